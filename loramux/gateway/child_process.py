"""Children that die with this process, and are left alone by a terminal's Ctrl-C so that we end them in order."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that has the kernel send SIGTERM to the child when the thread that started it ends; None off Linux."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return arrange


def start_child(
    command: Sequence[str], *, stdin: int | None = subprocess.DEVNULL, stderr: int | IO[Any] | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start in a session of its own. Call from the main thread: the child ends when the calling thread does."""
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=tuple(pass_fds),
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


def stop_child(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """SIGTERM, then SIGKILL after `timeout_s`; the exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
