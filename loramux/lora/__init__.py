"""Adapters on a device: host cache, slots, the batched application inside linear layers."""
