"""Admin routes: tenants, keys, adapter versions, aliases, grants, engines."""
