"""`loramux tenants|keys|adapters`: a client of the admin API. Prints the server's JSON; an error is one line and the code 1."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

if TYPE_CHECKING:
    import httpx

tenants = typer.Typer(help="Tenants: their share and their cache salt.", no_args_is_help=True)
keys = typer.Typer(help="API keys of a tenant.", no_args_is_help=True)
adapters = typer.Typer(help="Adapter versions, aliases and grants.", no_args_is_help=True)

_TIMEOUT_S = 600.0


Base = Annotated[str, typer.Option(help="The served base's name.")]
Grants = Annotated[list[str] | None, typer.Option("--tenant", help="Tenant that may use it, or `*`; may be repeated.")]
Preload = Annotated[Literal["none", "host", "device"], typer.Option(help="Where the new version shall be before the command returns.")]
Place = Annotated[Literal["host", "device"], typer.Option(help="Host memory, or a slot on the device.")]


def call(method: str, path: str, **content: Any) -> None:
    """Send one request and print the answer."""
    import httpx

    url, key = os.environ.get("LORAMUX_URL", "http://127.0.0.1:8000"), os.environ.get("LORAMUX_ADMIN_KEY", "")
    if not key:
        _fail("set LORAMUX_ADMIN_KEY to the admin key that the server's first start printed")
    try:
        response = httpx.request(
            method, f"{url.rstrip('/')}/admin/v1{path}", headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT_S, **content
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _fail(f"{url} does not answer ({type(error).__name__}); is the server running, and LORAMUX_URL right?")
    if not response.is_success:
        _fail(_problem(response))
    if response.content:
        try:
            print(json.dumps(response.json(), indent=2, ensure_ascii=False))
        except ValueError:
            _fail(f"{url} answers, but not as loramux; is LORAMUX_URL right?")


def _problem(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"


def _fail(message: str) -> NoReturn:
    print(f"loramux: {message}", file=sys.stderr)
    raise typer.Exit(1)


@tenants.command("create")
def create_tenant(tenant: str, weight: Annotated[float, typer.Option(help="Share of the engine.")] = 1.0) -> None:
    """Make a tenant."""
    call("POST", "/tenants", json={"id": tenant, "weight": weight})


@tenants.command("list")
def list_tenants() -> None:
    """Every tenant."""
    call("GET", "/tenants")


@tenants.command("set")
def set_tenant(tenant: str, weight: Annotated[float, typer.Option(help="Share of the engine.")]) -> None:
    """Change a tenant's share."""
    call("PATCH", f"/tenants/{tenant}", json={"weight": weight})


@tenants.command("delete")
def delete_tenant(tenant: str) -> None:
    """Delete a tenant, its keys and its grants."""
    call("DELETE", f"/tenants/{tenant}")


@tenants.command("rotate-salt")
def rotate_salt(tenant: str) -> None:
    """Cut a tenant off from its own cached blocks."""
    call("POST", f"/tenants/{tenant}/rotate-salt")


@keys.command("create")
def create_key(
    tenant: str,
    scope: Annotated[list[str] | None, typer.Option(help="`infer` or `admin`; may be repeated.")] = None,
    expires_at: Annotated[str | None, typer.Option(help="ISO 8601 with an offset: 2030-01-31T00:00:00Z.")] = None,
) -> None:
    """Make a key; it is shown only here."""
    call("POST", f"/tenants/{tenant}/keys", json={"scopes": scope or ["infer"], "expires_at": expires_at})


@keys.command("list")
def list_keys(tenant: str) -> None:
    """A tenant's keys, without their secrets."""
    call("GET", f"/tenants/{tenant}/keys")


@keys.command("delete")
def delete_key(tenant: str, key_id: str) -> None:
    """Revoke a key at once."""
    call("DELETE", f"/tenants/{tenant}/keys/{key_id}")


@adapters.command("list")
def list_adapters() -> None:
    """Every adapter with its versions."""
    call("GET", "/adapters")


@adapters.command("show")
def show_adapter(name: str) -> None:
    """One adapter."""
    call("GET", f"/adapters/{name}")


@adapters.command("register")
def register_adapter(name: str, source: str, base: Base, tenant: Grants = None, preload: Preload = "none") -> None:
    """Register a PEFT directory that the server can read under its --adapter-root."""
    uri = source if ":" in source else f"file:{Path(source).resolve()}"
    fields = {"base": base, "source": {"uri": uri}, "tenants": tenant or [], "preload": {"tier": preload}}
    call("POST", f"/adapters/{name}/versions", json=fields)


@adapters.command("upload")
def upload_adapter(name: str, directory: Path, base: Base, tenant: Grants = None, preload: Preload = "none") -> None:
    """Upload a PEFT directory of this machine."""
    from loramux.adapters.added_tokens import ADDED_TOKENS_FILE
    from loramux.adapters.peft_format import CONFIG_FILE, TENSORS_FILE

    optional = [ADDED_TOKENS_FILE] if (directory / ADDED_TOKENS_FILE).exists() else []
    with ExitStack() as stack:
        try:
            files = {file: stack.enter_context((directory / file).open("rb")) for file in (CONFIG_FILE, TENSORS_FILE, *optional)}
        except OSError as error:
            _fail(f"{error.filename} can't be read: {error.strerror}")
        fields = {"base": base, "tenants": json.dumps(tenant or []), "preload": json.dumps({"tier": preload})}
        call("POST", f"/adapters/{name}/versions", data=fields, files=files)


@adapters.command("preload")
def preload_version(name: str, version: int, tier: Place = "device") -> None:
    """Have every engine load a version, now and whenever one starts."""
    call("POST", f"/adapters/{name}/versions/{version}/preload", json={"tier": tier})


@adapters.command("pin")
def pin_version(name: str, version: int, tier: Place = "device") -> None:
    """Load a version and keep it loaded."""
    call("POST", f"/adapters/{name}/versions/{version}/pin", json={"tier": tier})


@adapters.command("unpin")
def unpin_version(name: str, version: int) -> None:
    """Let a version be evicted again."""
    call("POST", f"/adapters/{name}/versions/{version}/pin", json={"pinned": False})


@adapters.command("drain")
def drain_version(name: str, version: int) -> None:
    """Refuse new requests for a version; registering it again makes it ready."""
    call("POST", f"/adapters/{name}/versions/{version}/drain")


@adapters.command("alias")
def set_alias(name: str, alias: str, version: int) -> None:
    """Point an alias, such as `prod`, at a version."""
    call("PUT", f"/adapters/{name}/aliases/{alias}", json={"version": version})


@adapters.command("grant")
def set_grants(name: str, tenant: Grants = None) -> None:
    """Replace the list of tenants that may use an adapter."""
    call("PUT", f"/adapters/{name}/grants", json={"tenants": tenant or []})


@adapters.command("delete")
def delete_adapter(name: str, version: Annotated[int | None, typer.Option(help="Only this version.")] = None) -> None:
    """Delete an adapter, or one version of it."""
    call("DELETE", f"/adapters/{name}" if version is None else f"/adapters/{name}/versions/{version}")


@adapters.command("inspect")
def inspect_adapter(
    directory: Path,
    model: Annotated[str | None, typer.Option(help="The checkpoint that it shall be served with.")] = None,
    dtype: Annotated[str, typer.Option(help="As of `serve`.")] = "auto",
    max_lora_rank: Annotated[int, typer.Option(help="As of `serve`.")] = 64,
) -> None:
    """Print the registration report of a PEFT directory, without a server; the exit code is 0 if it is valid."""
    from loramux.gateway.cli.inspect_adapter import run_inspect

    raise typer.Exit(run_inspect(directory, model, dtype, max_lora_rank))
