"""Starts an engine process, notices its end, tells the client, and starts it again."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, Protocol

import msgspec

from loramux.engine.config import EngineConfig
from loramux.engine.types import EngineInfo
from loramux.errors import StartupFailed
from loramux.gateway.child_process import start_child, stop_child

log = logging.getLogger("loramux.fleet")

ENGINE_COMMAND = (sys.executable, "-m", "loramux.engine.process")
STOP_S = 10.0
_POLL_S = 0.02
_BACKOFF_S = (0.1, 1.0, 2.0, 5.0, 10.0, 30.0)
_SILENT_S = 30.0
"""An engine that lives but that the client has lost for so long hangs, and is ended."""
_STEADY_S = 60.0
"""An engine that has run so long has its next failure counted as the first."""


class Client(Protocol):
    """What a supervisor needs of `EngineClient`."""

    @property
    def info(self) -> EngineInfo | None: ...

    def lost(self, reason: str) -> None: ...

    def shut_down(self) -> None: ...


class EngineProcess:
    """One run of an engine. Two threads serve it: one passes its log on, one waits for its end."""

    def __init__(self, config: EngineConfig, command: Sequence[str]) -> None:
        self.started_at = time.monotonic()
        self.reason = ""
        """The last `startup_failed` message that it logged."""
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.process: subprocess.Popen[bytes] = start_child(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdin and self.process.stderr
        self._log_reader = threading.Thread(target=self._pass_log_on, args=(self.process.stderr,), name="engine-log", daemon=True)
        self._log_reader.start()
        threading.Thread(target=self._wait, name="engine-wait", daemon=True).start()
        try:
            with self.process.stdin as stdin:
                stdin.write(msgspec.json.encode(config))
        except BrokenPipeError:
            log.error("the engine did not read its settings")

    def _wait(self) -> None:
        self.process.wait()
        self._log_reader.join(timeout=1.0)  # its own children may hold the pipe open longer
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.ended.set)

    def _pass_log_on(self, lines: IO[bytes]) -> None:
        """All but the line of a failed start that says no more than its message, which is told in its place."""
        with lines:
            for line in lines:
                text = line.decode(errors="replace")
                failure = _startup_failure(text)
                if failure is not None:
                    self.reason = str(failure.get("message", ""))
                if failure is None or "exception" in failure:
                    sys.stderr.write(text)
                    sys.stderr.flush()


class Supervisor:
    """`start` the engine, then `watch` it for as long as the gateway runs, then `stop`."""

    def __init__(self, config: EngineConfig, client: Client, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._config, self._client, self._command = config, client, command
        self._engine: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        return None if self._engine is None else self._engine.process.pid

    async def start(self) -> None:
        """Return once the engine is ready. Raises StartupFailed with the engine's own reason."""
        self._engine = EngineProcess(self._config, self._command)
        while self._client.info is None:
            if self._engine.ended.is_set():
                raise StartupFailed(
                    self._engine.reason or f"the engine {_how(self._engine.process)} before it was ready; its log says more"
                )
            await asyncio.sleep(_POLL_S)

    async def watch(self) -> None:
        """Never returns: whenever the engine ends, end what was in flight and start it again."""
        failures = 0
        while True:
            assert self._engine is not None
            await self._ended_or_made_to(self._engine)
            self._client.lost("the engine process ended")
            if time.monotonic() - self._engine.started_at > _STEADY_S:
                failures = 0
            delay_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
            log.error(f"the engine {_how(self._engine.process)}", extra={"fields": {"restart_in_s": delay_s}})
            await asyncio.sleep(delay_s)
            failures += 1
            try:
                await self.start()
                log.info("the engine is back", extra={"fields": {"pid": self.pid}})
            except StartupFailed as error:
                log.error(error.message)

    async def _ended_or_made_to(self, engine: EngineProcess) -> None:
        heard_at = time.monotonic()
        while not engine.ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_SILENT_S / 30):
                    await engine.ended.wait()
            now = time.monotonic()
            heard_at = now if self._client.info is not None else heard_at
            if now - heard_at > _SILENT_S:
                log.error("the engine hangs and is ended", extra={"fields": {"pid": engine.process.pid}})
                await asyncio.to_thread(stop_child, engine.process, 1.0)
                await engine.ended.wait()

    async def abandon(self) -> None:
        """End what is in flight at once, then the engine. Nothing may `watch` it."""
        self._client.lost("the gateway is stopping")
        await self.stop()

    async def stop(self) -> None:
        """Ask it to end, then make it. One that is still loading would not hear."""
        if self._engine is None or self._engine.ended.is_set():
            return
        if self._client.info is None:
            await asyncio.to_thread(stop_child, self._engine.process, 1.0)
            return
        self._client.shut_down()
        try:
            async with asyncio.timeout(STOP_S):
                await self._engine.ended.wait()
        except TimeoutError:
            await asyncio.to_thread(stop_child, self._engine.process, 1.0)


def _startup_failure(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.get("event") == "startup_failed" else None


def _how(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
