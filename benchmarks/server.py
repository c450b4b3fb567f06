"""`loramux serve` in a process of its own, and the requests that benchmarks make of it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import closed_loop
import httpx
from random_adapters import write_random_adapter

from loramux.engine.checkpoint import open_checkpoint

START_TIMEOUT_S = 300
BASE = "base"


@dataclass(frozen=True)
class Server:
    url: str
    admin_key: str
    adapter_root: Path
    pid: int
    """Of the gateway; the engine and the store are its children."""
    started_at: float
    """By `time.time()`, just before its process was."""
    log: Path
    base: str = BASE
    """The served model's name."""


@contextmanager
def serving(model: Path, directory: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server on a free port, once it is ready. It keeps everything in `directory`, which a server may have used before; its log is shown
    if it fails to start."""
    port, admin_key, log_path, adapter_root = free_port(), secrets.token_hex(32), directory / "serve.log", directory / "adapters"
    adapter_root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "loramux", "serve", "--model", str(model), "--served-model-name", BASE]
    command += ["--port", str(port), "--data-dir", str(directory / "data"), "--adapter-root", str(adapter_root), *flags]
    started_at = time.time()
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "LORAMUX_ADMIN_KEY": admin_key})
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url) as client:
            if not answers(process, client, "/health/ready", START_TIMEOUT_S):
                sys.exit(f"the server did not start:\n{log_path.read_text()}")
        yield Server(url, admin_key, adapter_root, process.pid, started_at, log_path)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def answers(process: subprocess.Popen[bytes], client: httpx.Client, path: str, timeout_s: float) -> bool:
    """Whether the process answers a GET with a 200 before it ends, and in time."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get(path).status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    return False


def admin_client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/admin/v1", headers={"Authorization": f"Bearer {server.admin_key}"}, timeout=120)


def infer_client(server: Server, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=600, headers={"Authorization": f"Bearer {key}"}, limits=limits)


def new_tenant(admin: httpx.Client, tenant: str) -> str:
    """A tenant and the key of it."""
    call(admin, "POST", "/tenants", {"id": tenant})
    key: str = call(admin, "POST", f"/tenants/{tenant}/keys", {"scopes": ["infer"]})["key"]
    return key


def register(admin: httpx.Client, directory: Path, tenant: str) -> str:
    """Register a PEFT directory under its own name, granted to the tenant. -> the model name to ask for"""
    body = {"base": BASE, "source": {"uri": f"file:{directory}"}, "tenants": [tenant]}
    call(admin, "POST", f"/adapters/{directory.name}/versions", body)
    return f"{BASE}:{directory.name}"


def call(admin: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    response = admin.request(method, path, json=body)
    if not response.is_success:
        sys.exit(f"{path}: {response.status_code} {response.text}")
    return response.json() if response.content else None


def write_adapters(model: Path, root: Path, count: int, rank: int, **options: Any) -> list[Path]:
    """Random adapters `random-0` and so on; `options` as `write_random_adapter` has them."""
    config = open_checkpoint(str(model), root.parent / "checkpoints").config
    paths = [root / f"random-{rank}-{i}" for i in range(count)]
    for seed, path in enumerate(paths):
        write_random_adapter(path, config, rank, seed, **options)
    return paths


def send(server: Server, key: str, bodies: Sequence[Mapping[str, Any]], num_streams: int) -> dict[str, Any]:
    """`closed_loop.send`. Raises SystemExit if a request fails."""

    async def run() -> dict[str, Any]:
        async with infer_client(server, key) as client:
            return await closed_loop.send(client, bodies, num_streams)

    return checked(asyncio.run(run()))


def send_load(server: Server, key: str, load: closed_loop.Load) -> dict[str, Any]:
    """`closed_loop.run`. Raises SystemExit if a request fails."""

    async def run() -> dict[str, Any]:
        async with infer_client(server, key) as client:
            return await closed_loop.run(client, load)

    return checked(asyncio.run(run()))


def checked(figures: dict[str, Any]) -> dict[str, Any]:
    if figures["errors"]:
        sys.exit(f"{figures['errors']} requests failed: {figures['first_error']}")
    return figures
