"""Adapters in host memory: loaded off the engine's step, once at a time per digest, within a bound of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from loramux.errors import AdapterInvalid, EngineFailed


class Sized(Protocol):
    """What the cache needs to know of what it holds."""

    @property
    def num_bytes(self) -> int: ...


_CLOSED = "the engine is stopping"

_Adapter = TypeVar("_Adapter", bound=Sized)


@dataclass
class _Entry(Generic[_Adapter]):
    num_pins: int = 0
    num_bytes: int | None = None
    """None until loaded once."""
    value: _Adapter | None = None
    waiters: list[Future[_Adapter]] = field(default_factory=list)


class HostCache(Generic[_Adapter]):
    """Thread-safe. `acquire` pins; each pin whose future succeeded is undone by exactly one `release`; a failed future holds no pin.

    Where pinned adapters leave no room, loads wait in order of arrival until a release makes it.
    """

    def __init__(self, capacity_bytes: int, load: Callable[[str], _Adapter], *, num_threads: int = 2) -> None:
        self._capacity_bytes = capacity_bytes
        self._load = load
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lora-load")
        self._lock = threading.Lock()
        self._closed = False
        self._entries: dict[str, _Entry[_Adapter]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Loaded and not pinned, least recently used first."""
        self._queue: deque[str] = deque()
        """Waiting for a thread, or for room."""
        self._loaded_bytes = 0
        self._pinned_bytes = 0
        self._reserved_bytes = 0
        """Of loads in flight whose size is known, because they found no room before."""

    @property
    def num_adapters(self) -> int:
        with self._lock:
            return sum(entry.value is not None for entry in self._entries.values())

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._loaded_bytes

    def acquire(self, digest: str) -> Future[_Adapter]:
        """Pin an adapter, loading it if need be. The future is done at once if it is loaded already, and can't be cancelled.

        The future raises what `load` raised; `AdapterInvalid` if the adapter is larger than the whole cache; `EngineFailed` if the
        cache is closed first. Its callbacks may run in a loading thread.
        """
        future: Future[_Adapter] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            value = self._pin(digest, future)
        if value is not None:
            future.set_result(value)
        elif self._closed:
            self.close()
        return future

    def release(self, digest: str) -> None:
        """Undo one successful `acquire`. Raises KeyError if there is none to undo."""
        with self._lock:
            entry = self._entries[digest]
            if entry.value is None or entry.num_pins == 0:
                raise KeyError(f"{digest} is not pinned")
            entry.num_pins -= 1
            if entry.num_pins == 0:
                self._idle[digest] = None
                self._pinned_bytes -= entry.value.num_bytes
                self._start_loads()

    def close(self) -> None:
        """Fail what waits, and end the threads once their loads have ended. Further acquires fail."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=True)
        with self._lock:
            waiters = [future for digest in self._queue for future in self._entries.pop(digest).waiters]
            self._queue.clear()
        _fail(waiters, EngineFailed(_CLOSED))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count agrees. For tests."""
        with self._lock:
            loaded = {digest: entry for digest, entry in self._entries.items() if entry.value is not None}
            assert self._loaded_bytes == sum(entry.num_bytes or 0 for entry in loaded.values()) <= self._capacity_bytes
            assert self._pinned_bytes == sum(entry.num_bytes or 0 for entry in loaded.values() if entry.num_pins)
            assert set(self._idle) == {digest for digest, entry in loaded.items() if entry.num_pins == 0}
            assert all(entry.num_pins == len(entry.waiters) > 0 for entry in self._entries.values() if entry.value is None)
            assert not any(entry.waiters for entry in loaded.values())
            assert all(self._entries[digest].value is None for digest in self._queue)

    def _pin(self, digest: str, future: Future[_Adapter]) -> _Adapter | None:
        entry = self._entries.get(digest)
        if entry is None:
            entry = self._entries[digest] = _Entry()
            self._queue.append(digest)
        if entry.value is None:
            entry.waiters.append(future)
        elif entry.num_pins == 0:
            del self._idle[digest]
            self._pinned_bytes += entry.value.num_bytes
        entry.num_pins += 1
        self._start_loads()
        return entry.value

    def _start_loads(self) -> None:
        while self._queue and not self._closed and self._has_room(self._entries[self._queue[0]].num_bytes or 0):
            digest = self._queue.popleft()
            self._reserved_bytes += self._entries[digest].num_bytes or 0
            self._threads.submit(self._run, digest)

    def _has_room(self, num_bytes: int) -> bool:
        return self._pinned_bytes + self._reserved_bytes + num_bytes <= self._capacity_bytes

    def _run(self, digest: str) -> None:
        try:
            if self._closed:
                raise EngineFailed(_CLOSED)
            value = self._load(digest)
            if value.num_bytes > self._capacity_bytes:
                raise AdapterInvalid(f"the adapter has {value.num_bytes} bytes, the host cache holds {self._capacity_bytes} in all")
        except Exception as error:
            _fail(self._drop(digest), error)
        else:
            for future in self._keep(digest, value):
                future.set_result(value)

    def _drop(self, digest: str) -> list[Future[_Adapter]]:
        with self._lock:
            entry = self._entries.pop(digest)
            self._reserved_bytes -= entry.num_bytes or 0
            self._start_loads()
            return entry.waiters

    def _keep(self, digest: str, value: _Adapter) -> list[Future[_Adapter]]:
        """Take the loaded adapter in, or, if the pinned ones leave no room by now, forget it and queue it again, first in line."""
        with self._lock:
            entry = self._entries[digest]
            self._reserved_bytes -= entry.num_bytes or 0
            entry.num_bytes = value.num_bytes
            if not self._has_room(value.num_bytes):
                self._queue.appendleft(digest)
                return []
            self._evict(self._capacity_bytes - value.num_bytes)
            entry.value = value
            self._loaded_bytes += value.num_bytes
            self._pinned_bytes += value.num_bytes
            waiters, entry.waiters = entry.waiters, []
            self._start_loads()
            return waiters

    def _evict(self, at_most_bytes: int) -> None:
        while self._loaded_bytes > at_most_bytes:
            digest, _ = self._idle.popitem(last=False)
            self._loaded_bytes -= self._entries.pop(digest).num_bytes or 0


def _fail(futures: list[Future[_Adapter]], error: Exception) -> None:
    for future in futures:
        future.set_exception(error)
