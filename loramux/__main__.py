"""`python -m loramux` is the command `loramux`."""

from loramux.gateway.cli.main import app

app()
