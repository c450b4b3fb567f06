"""A compile worker as its service sees it: started, asked, killed when it overruns, and started again."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import loramux
from loramux.errors import EngineFailed, GrammarTooComplex, LoramuxError
from loramux.grammar.types import Constraint
from loramux.grammar.worker_protocol import Compile, FromWorker, Refused, Setup, Vetted, decode_from_worker, read_frame, write_frame

START_S = 120.0
"""For a worker to become ready, on a machine that has much else to do."""


class _Lost(Exception):
    """The worker died or ran out of time."""


class WorkerProcess:
    """Used by one thread; only `close` may be called from another."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._closed = False
        self._is_ready = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Returns at once; the process gets ready by itself. Does nothing once closed."""
        with self._lock:
            if self._closed:
                return
            self._is_ready = False
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loramux.grammar.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        self._send(self._process, self._setup)

    def vet(self, constraint: Constraint, wall_s: float) -> str:
        """EBNF that compiles within the limits. Raises what the worker refuses with, `GrammarTooComplex` where the job killed it,
        `EngineFailed` where it can't be started."""
        process = self._ready_process()
        self._send(process, Compile(constraint))
        try:
            reply = self._receive(process, wall_s)
        except _Lost:
            self.discard()
            self.start()
            raise GrammarTooComplex("compiling the constraint takes too much time or memory") from None
        if isinstance(reply, Vetted):
            return reply.grammar
        raise LoramuxError.from_failure(reply.failure) if isinstance(reply, Refused) else EngineFailed("a compile worker is out of step")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _ready_process(self) -> subprocess.Popen[bytes]:
        """A worker that is alive and ready; one that died while idle is replaced."""
        if self._process is None or self._process.poll() is not None:
            self.discard()
            self.start()
        process = self._process
        if process is None:
            raise EngineFailed("the grammar service is closed")
        if not self._is_ready:
            self._await_ready(process)
        return process

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        try:
            reply = self._receive(process, START_S)
        except _Lost:
            self.discard()
            raise EngineFailed("a compile worker could not be started") from None
        if isinstance(reply, Refused):
            raise LoramuxError.from_failure(reply.failure)
        self._is_ready = True

    def _send(self, process: subprocess.Popen[bytes], message: Setup | Compile) -> None:
        assert process.stdin is not None
        try:
            write_frame(process.stdin, message)
        except OSError:
            return  # It is dead, which the wait for its reply will find.

    def _receive(self, process: subprocess.Popen[bytes], timeout_s: float) -> FromWorker:
        """Replies are written at once when they are ready, so the wait is for the first byte; raises `_Lost`."""
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise _Lost
        frame = read_frame(process.stdout)
        if frame is None:
            raise _Lost
        return decode_from_worker(frame)

    def discard(self) -> None:
        """Kills the process, if there is one, and waits for it."""
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()
            except OSError:
                continue
        self._process = None


def _environment() -> dict[str, str]:
    """This process's, able to import this very package."""
    root = str(Path(loramux.__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": root if not path else f"{root}{os.pathsep}{path}"}
