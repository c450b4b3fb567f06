"""`loramux serve` as its own process, as a user would start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

ADMIN_KEY = "admin-key-of-the-test-run-0123456789abcdef"
START_S = 90.0


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def admin(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.request(method, f"{self.url}/admin/v1{path}", headers=headers, timeout=60, **kwargs)

    def must(self, method: str, path: str, **kwargs: Any) -> Any:
        """The answer's JSON; AssertionError if it is not a success."""
        response = self.admin(method, path, **kwargs)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json() if response.content else None

    def new_tenant(self, tenant: str, scopes: tuple[str, ...] = ("infer",)) -> str:
        """Make a tenant with one key, and return the key."""
        self.must("POST", "/tenants", json={"id": tenant})
        key: str = self.must("POST", f"/tenants/{tenant}/keys", json={"scopes": list(scopes)})["key"]
        return key

    def register(self, name: str, directory: Path, base: str, tenants: list[str]) -> Any:
        body = {"base": base, "source": {"uri": f"file:{directory}"}, "tenants": tenants}
        return self.must("POST", f"/adapters/{name}/versions", json=body)

    def client(self, key: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def engine(self) -> Any:
        """The only engine's entry: description and gauges."""
        (engine,) = self.must("GET", "/engines")["data"]
        return engine

    def wait_ready(self, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"serve exited with {self.process.returncode}:\n{self.log()}")
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.log()}")

    def log(self) -> str:
        return self.log_path.read_text()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


def assert_idle(server: Server, timeout_s: float = 5.0) -> None:
    """Every pool is empty again: no block, slot, grammar or request is held."""
    names = ("num_running", "num_waiting", "num_blocks_used", "num_slots_used", "num_grammars")
    deadline = time.monotonic() + timeout_s
    while True:
        stats = server.engine()["stats"]
        held = {name: stats[name] for name in names if stats[name]}
        if not held:
            return
        assert time.monotonic() < deadline, f"still held: {held}"
        time.sleep(0.1)


def engine_pid(server: Server) -> int:
    """Of the only engine."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    (pid,) = [int(child) for child in children if "loramux.engine.process" in Path(f"/proc/{child}/cmdline").read_text()]
    return pid


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running_server(model: Path, data_dir: Path, *flags: str, name: str = "tiny") -> Iterator[Server]:
    """Start, wait until ready, stop. Standard output and error go to `serve.log` in the data directory's parent."""
    port = free_port()
    log_path = data_dir.parent / f"{data_dir.name}-serve.log"
    command = [sys.executable, "-m", "loramux", "serve", "--model", str(model), "--served-model-name", name, "--port", str(port)]
    command += ["--data-dir", str(data_dir), "--device", "cpu", *flags]
    with log_path.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "LORAMUX_ADMIN_KEY": ADMIN_KEY})
    server = Server(f"http://127.0.0.1:{port}", process, log_path)
    try:
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
