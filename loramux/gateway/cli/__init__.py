"""The `loramux` command."""
