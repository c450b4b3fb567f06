"""The Redis-protocol store: an embedded Valkey child, or a server that is there already."""
