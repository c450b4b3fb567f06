"""The command `loramux`. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

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


@app.command()
def demo(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    data_dir: Annotated[Path | None, typer.Option(help="Where the demo model and the demo's own store are kept.")] = None,
    examples: Annotated[Path | None, typer.Option(help="The directory examples/ of a clone, if it is not beside the package.")] = None,
    fetch_only: Annotated[bool, typer.Option("--fetch-only", help="Only fetch the demo model, and print its directory.")] = False,
) -> None:
    """Fetch the demo model once, serve it with the demo adapters, and print a request to try."""
    from loramux.gateway.cli.demo import run_demo, run_fetch

    raise typer.Exit(run_fetch(data_dir) if fetch_only else run_demo(port, data_dir, examples))
