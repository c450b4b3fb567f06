"""Adapters in host memory: loaded off the engine's step, once at a time per digest, within a bound of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from loramux.errors import AdapterInvalid, AdapterLoading, Conflict, EngineFailed


class Sized(Protocol):
    """What the cache needs to know of what it holds."""

    @property
    def num_bytes(self) -> int: ...


_CLOSED = "the engine is stopping"

_Adapter = TypeVar("_Adapter", bound=Sized)


class HostState(NamedTuple, Generic[_Adapter]):
    """Of one adapter that the cache has, or is about to have."""

    value: _Adapter | None
    """None while it is loaded."""
    pinned: bool
    """By the operator."""
    dropped: bool


@dataclass
class _Entry(Generic[_Adapter]):
    num_users: int = 0
    """The operator's pin among them."""
    pinned: bool = False
    """By the operator."""
    dropped: bool = False
    """Not kept when its last user goes."""
    num_bytes: int | None = None
    """None until loaded once."""
    value: _Adapter | None = None
    waiters: list[Future[_Adapter]] = field(default_factory=list)


class HostCache(Generic[_Adapter]):
    """Thread-safe. Each `acquire` whose future succeeded makes a user, undone by exactly one `release`; a failed future makes none.

    Where adapters in use leave no room, loads wait in order of arrival until a release makes it. What the operator pins leaves room
    for the largest adapter seen; one that is larger still can't be loaded as long as the pins stand.
    """

    def __init__(self, capacity_bytes: int, load: Callable[[str], _Adapter], *, num_threads: int = 2) -> None:
        self._capacity_bytes = capacity_bytes
        self._load = load
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lora-load")
        self._lock = threading.Lock()
        self._closed = False
        self._entries: dict[str, _Entry[_Adapter]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Loaded and without users, least recently used first."""
        self._queue: deque[str] = deque()
        """Waiting for a thread, or for room."""
        self._loaded_bytes = 0
        self._used_bytes = 0
        self._reserved_bytes = 0
        """Of loads in flight whose size is known, because they found no room before."""
        self._operator_bytes = 0
        """Of adapters that the operator has pinned."""
        self._largest_bytes = 0
        """Of all adapters loaded so far."""
        self._changed: set[str] = set()
        self.num_loads = 0
        """Total since start, the failed ones not counted."""
        self.num_evictions = 0
        """Total since start: for room, or of dropped adapters."""

    @property
    def num_adapters(self) -> int:
        with self._lock:
            return sum(entry.value is not None for entry in self._entries.values())

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._loaded_bytes

    @property
    def num_loading(self) -> int:
        with self._lock:
            return sum(entry.value is None for entry in self._entries.values())

    def state(self, digest: str) -> HostState[_Adapter] | None:
        """None if the cache knows nothing of the adapter."""
        with self._lock:
            entry = self._entries.get(digest)
            return None if entry is None else HostState(entry.value, entry.pinned, entry.dropped)

    def take_changed(self) -> set[str]:
        """Adapters whose state has changed since this was last asked."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return changed

    def acquire(self, digest: str) -> Future[_Adapter]:
        """Use an adapter, loading it if need be. The future is done at once if it is loaded already, and can't be cancelled.

        The future raises what `load` raised; `AdapterInvalid` if the adapter is larger than the whole cache; `AdapterLoading` if it is
        larger than what the operator's pins leave; `EngineFailed` if the cache is closed first. Its callbacks may run in a loading thread.
        """
        future: Future[_Adapter] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            value = self._use(digest, future)
        if value is not None:
            future.set_result(value)
        elif self._closed:
            self.close()
        return future

    def release(self, digest: str) -> None:
        """Undo one successful `acquire`. Raises KeyError if there is none to undo."""
        with self._lock:
            entry = self._entries[digest]
            if entry.value is None or entry.num_users == entry.pinned:
                raise KeyError(f"{digest} has no user")
            self._unuse(digest, entry, entry.value)

    def pin(self, digest: str) -> None:
        """Keep a loaded adapter that the caller has acquired until `unpin`, though it was dropped before.

        Raises `Conflict` if the pins would leave no room for the largest adapter seen.
        """
        with self._lock:
            entry = self._entries[digest]
            assert entry.value is not None and entry.num_users, f"{digest} is not acquired"
            num_bytes = entry.value.num_bytes
            if not entry.pinned:
                if self._operator_bytes + num_bytes + self._largest_bytes > self._capacity_bytes:
                    raise Conflict(
                        f"pins of {self._operator_bytes + num_bytes} bytes leave no room in a host cache of {self._capacity_bytes}"
                    )
                entry.pinned = True
                entry.num_users += 1
                self._operator_bytes += num_bytes
            entry.dropped = False
            self._changed.add(digest)

    def keep(self, digest: str) -> None:
        """Undo a `drop` of an adapter that the caller has acquired."""
        with self._lock:
            self._entries[digest].dropped = False
            self._changed.add(digest)

    def unpin(self, digest: str) -> None:
        """Take the operator's pin away; nothing happens if there is none."""
        with self._lock:
            self._unpin(digest)

    def drop(self, digest: str) -> None:
        """Unpin an adapter, and free it once it has no user; nothing happens if it is not there."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return
            entry.dropped = True
            self._changed.add(digest)
            self._unpin(digest)
            if digest in self._idle:
                del self._idle[digest]
                self._remove(digest)

    def close(self) -> None:
        """Fail what waits, and end the threads once their loads have ended. Further acquires fail."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=True)
        with self._lock:
            self._changed.update(self._queue)
            waiters = [future for digest in self._queue for future in self._entries.pop(digest).waiters]
            self._queue.clear()
        _fail(waiters, EngineFailed(_CLOSED))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count agrees. For tests."""
        with self._lock:
            loaded = {digest: entry for digest, entry in self._entries.items() if entry.value is not None}
            assert self._loaded_bytes == sum(entry.num_bytes or 0 for entry in loaded.values()) <= self._capacity_bytes
            assert self._used_bytes == sum(entry.num_bytes or 0 for entry in loaded.values() if entry.num_users)
            assert set(self._idle) == {digest for digest, entry in loaded.items() if entry.num_users == 0}
            assert all(entry.num_users == len(entry.waiters) > 0 for entry in self._entries.values() if entry.value is None)
            assert not any(entry.waiters for entry in loaded.values())
            assert self._operator_bytes == sum(entry.num_bytes or 0 for entry in loaded.values() if entry.pinned)
            assert all(entry.num_users and not entry.dropped for entry in self._entries.values() if entry.pinned)
            assert all(entry.num_users for entry in self._entries.values() if entry.dropped)
            assert all(self._entries[digest].value is None for digest in self._queue)

    def _use(self, digest: str, future: Future[_Adapter]) -> _Adapter | None:
        entry = self._entries.get(digest)
        if entry is None:
            entry = self._entries[digest] = _Entry()
            self._queue.append(digest)
            self._changed.add(digest)
        if entry.value is None:
            entry.waiters.append(future)
        elif entry.num_users == 0:
            del self._idle[digest]
            self._used_bytes += entry.value.num_bytes
        entry.num_users += 1
        self._start_loads()
        return entry.value

    def _unuse(self, digest: str, entry: _Entry[_Adapter], value: _Adapter) -> None:
        entry.num_users -= 1
        if entry.num_users:
            return
        self._used_bytes -= value.num_bytes
        if entry.dropped:
            self._remove(digest)
        else:
            self._idle[digest] = None
        self._start_loads()

    def _unpin(self, digest: str) -> None:
        entry = self._entries.get(digest)
        if entry is None or not entry.pinned or entry.value is None:
            return
        entry.pinned = False
        self._operator_bytes -= entry.value.num_bytes
        self._changed.add(digest)
        self._unuse(digest, entry, entry.value)

    def _remove(self, digest: str) -> None:
        """Free a loaded adapter that is neither used nor in the list of idle ones any more."""
        self._loaded_bytes -= self._entries.pop(digest).num_bytes or 0
        self.num_evictions += 1
        self._changed.add(digest)

    def _start_loads(self) -> None:
        while self._queue and not self._closed and self._has_room(self._entries[self._queue[0]].num_bytes or 0):
            digest = self._queue.popleft()
            self._reserved_bytes += self._entries[digest].num_bytes or 0
            self._threads.submit(self._run, digest)

    def _has_room(self, num_bytes: int) -> bool:
        return self._used_bytes + self._reserved_bytes + num_bytes <= self._capacity_bytes

    def _run(self, digest: str) -> None:
        try:
            if self._closed:
                raise EngineFailed(_CLOSED)
            value = self._load(digest)
            self._check_size(value.num_bytes)
        except Exception as error:
            _fail(self._give_up(digest), error)
        else:
            for future in self._keep(digest, value):
                future.set_result(value)

    def _check_size(self, num_bytes: int) -> None:
        """In the same breath the size counts as seen: no later pin takes the room away."""
        with self._lock:
            if num_bytes > self._capacity_bytes:
                raise AdapterInvalid(f"the adapter has {num_bytes} bytes, the host cache holds {self._capacity_bytes} in all")
            if num_bytes > self._capacity_bytes - self._operator_bytes:
                raise AdapterLoading(
                    f"the adapter has {num_bytes} bytes, pinned adapters hold {self._operator_bytes} of {self._capacity_bytes}"
                )
            self._largest_bytes = max(self._largest_bytes, num_bytes)

    def _give_up(self, digest: str) -> list[Future[_Adapter]]:
        with self._lock:
            entry = self._entries.pop(digest)
            self._changed.add(digest)
            self._reserved_bytes -= entry.num_bytes or 0
            self._start_loads()
            return entry.waiters

    def _keep(self, digest: str, value: _Adapter) -> list[Future[_Adapter]]:
        """Take the loaded adapter in, or, if those in use leave no room by now, forget it and queue it again, first in line."""
        with self._lock:
            entry = self._entries[digest]
            self._reserved_bytes -= entry.num_bytes or 0
            entry.num_bytes = value.num_bytes
            if not self._has_room(value.num_bytes):
                self._queue.appendleft(digest)
                return []
            self._evict(self._capacity_bytes - value.num_bytes)
            entry.value = value
            self.num_loads += 1
            self._changed.add(digest)
            self._loaded_bytes += value.num_bytes
            self._used_bytes += value.num_bytes
            waiters, entry.waiters = entry.waiters, []
            self._start_loads()
            return waiters

    def _evict(self, at_most_bytes: int) -> None:
        while self._loaded_bytes > at_most_bytes:
            digest, _ = self._idle.popitem(last=False)
            self._remove(digest)


def _fail(futures: list[Future[_Adapter]], error: Exception) -> None:
    for future in futures:
        future.set_exception(error)
