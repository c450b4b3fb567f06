"""SIGTERM and SIGINT: the first asks the server to stop, the second not to wait for what is in flight."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """Told to stop while nothing is served yet."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let the first signal raise `Stopped` in the main thread, out of whatever it waits for, until an event loop takes signals over."""
    told = False

    def stop(*_: object) -> None:
        nonlocal told
        if not told:  # a second one must not break into the cleaning up after the first
            told = True
            raise Stopped

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Signals as events of the running loop."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
