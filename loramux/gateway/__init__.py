"""HTTP: OpenAI and admin routes, keys, tenants, routing to engines, metrics, command line."""
