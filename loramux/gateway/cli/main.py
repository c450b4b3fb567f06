"""The command `loramux`. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from loramux.gateway.cli import admin_client
from loramux.gateway.cli.flags import with_settings_flags

app = typer.Typer(
    help="One base model, many LoRA adapters, many tenants, one OpenAI-compatible address.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(admin_client.tenants, name="tenants")
app.add_typer(admin_client.keys, name="keys")
app.add_typer(admin_client.adapters, name="adapters")


@app.command()
@with_settings_flags
def serve(config: Path | None, flags: dict[str, Any]) -> None:
    """Serve a base model and its adapters. Every flag is also a variable LORAMUX_* and a key of the TOML file."""
    from loramux.gateway.settings import UsageError, load_settings

    try:
        settings = load_settings(flags, config)
    except UsageError as error:
        print(f"loramux: {error}", file=sys.stderr)
        raise typer.Exit(2) from None

    from loramux.gateway.cli.serve import run_server

    raise typer.Exit(run_server(settings))
