"""Constraints: coverage, compilation, matchers, token bitmasks."""
