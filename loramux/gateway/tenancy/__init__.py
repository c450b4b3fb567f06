"""Tenants, their keys and their cache salts."""
