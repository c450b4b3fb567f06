from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn
from typer.testing import CliRunner

from loramux.gateway.app import create_app
from loramux.gateway.cli.flags import with_settings_flags
from loramux.gateway.cli.main import app as command
from loramux.gateway.settings import Settings
from tests.gateway.admin.adapters import write_adapter
from tests.gateway.served import ADMIN_KEY, Served


def _flags(*arguments: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @with_settings_flags
    def run(config: Path | None, flags: dict[str, Any]) -> None:
        seen.update(flags, config=config)

    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return seen


def test_only_flags_that_were_given_count() -> None:
    assert _flags() == {"config": None}
    given = _flags("--model", "m", "--no-auth", "--adapter-root", "/a", "--adapter-root", "/b", "--port", "0", "--kv-cache-gib", "0.5")
    roots = [Path("/a"), Path("/b")]
    assert given == {"model": "m", "no_auth": True, "adapter_root": roots, "port": 0, "kv_cache_gib": 0.5, "config": None}


def test_every_setting_has_its_flag() -> None:
    shown = CliRunner().invoke(command, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert [name for name in Settings.model_fields if "--" + name.replace("_", "-") not in shown] == []
    assert "--engines" not in shown


def _serve(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
    return subprocess.run(
        [sys.executable, "-m", "loramux", "serve", "--data-dir", str(directory / "data"), "--port", "0", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--model"),
        (("--model", "m", "--max-modle-len", "5"), "--max-model-len"),
        (("--model", "m", "--port", "x"), "--port"),
        (("--model", "m", "--max-loras", "0"), "--max-loras"),
        (("--model", "m", "--device", "foo"), "--device: Input should be 'auto', 'cpu' or 'cuda'"),
        (("--model", "m", "--dtype", "foo"), "--dtype: Input should be 'auto', 'bfloat16', 'float16' or 'float32'"),
        (("--model", "m", "--engines", "2"), "--engines"),
    ],
)
def test_bad_usage(flags: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(command, ["serve", *flags])
    assert result.exit_code == 2 and said in result.stderr


def test_an_unknown_variable_is_bad_usage() -> None:
    result = CliRunner().invoke(command, ["serve", "--model", "m"], env={"LORAMUX_MAX_LORA": "3"})
    assert result.exit_code == 2 and "LORAMUX_MAX_LORAS" in result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "{directory}/nowhere"), "no model at"),
        (("--model", "m", "--no-auth", "--host", "0.0.0.0"), "--no-auth"),
        (("--model", "m", "--host", "203.0.113.1"), "can't listen"),
    ],
)
def test_a_start_that_fails_is_one_line(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    result = _serve(tmp_path, *(flag.format(directory=tmp_path) for flag in flags))
    assert result.returncode == 1 and said in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.fixture
async def url(app: Served) -> AsyncIterator[str]:
    config = uvicorn.Config(create_app(app.services), port=0, log_config=None, lifespan="off", http="httptools")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


IN_SLOT = {"engine": "fake-0", "tier": "device", "state": "ready"}


async def _run(url: str, *arguments: str, key: str = ADMIN_KEY) -> Any:
    environment = {"LORAMUX_URL": url, "LORAMUX_ADMIN_KEY": key}
    return await asyncio.to_thread(CliRunner().invoke, command, arguments, env=environment)


async def test_the_admin_commands(app: Served, url: str) -> None:
    async def done(*arguments: str) -> Any:
        result = await _run(url, *arguments)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout) if result.stdout else None

    assert (await done("tenants", "create", "acme", "--weight", "2"))["weight"] == 2
    assert (await done("tenants", "set", "acme", "--weight", "3"))["weight"] == 3
    assert (await done("tenants", "rotate-salt", "acme"))["salt_epoch"] == 2
    key = await done("keys", "create", "acme", "--scope", "infer", "--expires-at", "2099-01-01T00:00:00Z")
    assert key["key"].startswith("lmx_acme.")
    assert [each["id"] for each in (await done("keys", "list", "acme"))["data"]] == [key["id"]]
    one, two = write_adapter(app.root / "one", seed=1), write_adapter(app.root.parent / "two", seed=2)
    assert (await done("adapters", "register", "tickets", str(one), "--base", "tiny", "--tenant", "acme"))["version"] == 1
    uploaded = await done("adapters", "upload", "tickets", str(two), "--base", "tiny", "--preload", "host")
    assert uploaded["version"] == 2 and uploaded["placements"][0]["tier"] == "host"
    assert (await done("adapters", "preload", "tickets", "1", "--tier", "host"))["placements"][0]["tier"] == "host"
    assert (await done("adapters", "pin", "tickets", "1"))["placements"][0] == {**IN_SLOT, "pinned": True}
    assert (await done("adapters", "unpin", "tickets", "1"))["placements"][0] == {**IN_SLOT, "pinned": False}
    assert (await done("adapters", "drain", "tickets", "1"))["state"] == "draining"
    (app.root.parent / "two" / "added_tokens.json").write_text('{"<new>": 99999}')
    refused = await _run(url, "adapters", "upload", "tickets", str(two), "--base", "tiny")
    assert refused.exit_code == 1 and "adapter_invalid" in refused.stderr and "<new>" in refused.stderr
    assert await done("adapters", "alias", "tickets", "prod", "2") == {"alias": "prod", "version": 2}
    assert (await done("adapters", "show", "tickets"))["tenants"] == ["acme"]
    assert await done("adapters", "grant", "tickets", "--tenant", "*") == {"tenants": ["*"]}
    assert await done("adapters", "delete", "tickets", "--version", "1") is None
    assert [len(each["versions"]) for each in (await done("adapters", "list"))["data"]] == [1]
    await done("adapters", "delete", "tickets")
    await done("keys", "delete", "acme", key["id"])
    await done("tenants", "delete", "acme")
    assert await done("tenants", "list") == {"data": []}


async def test_a_command_that_fails_is_one_line(url: str, tmp_path: Path) -> None:
    for result, said in (
        (await _run(url, "tenants", "delete", "nobody"), "not_found"),
        (await _run(url, "tenants", "list", key="a-wrong-key-0123456789"), "invalid_api_key"),
        (await _run(url, "tenants", "list", key=""), "LORAMUX_ADMIN_KEY"),
        (await _run("http://127.0.0.1:1", "tenants", "list"), "does not answer"),
        (await _run(f"{url}/metrics?", "tenants", "list"), "not as loramux"),
        (await _run(url, "adapters", "upload", "x", str(tmp_path / "nowhere"), "--base", "tiny"), "can't be read"),
    ):
        assert result.exit_code == 1 and said in result.stderr and len(result.stderr.splitlines()) == 1
        assert "0123456789" not in result.output
