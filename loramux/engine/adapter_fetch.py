"""Adapter bytes for the engine: its own copy on disk, else from a gateway."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

from loramux.adapters.contents import Contents, ContentStore
from loramux.engine.protocol import AdapterBytes
from loramux.errors import AdapterInvalid, AdapterLoading, EngineFailed, NotFound

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 60.0
_STOPPING = "the engine is stopping"


@dataclass
class _Want:
    """A digest that a loader thread waits for."""

    contents: Future[Contents] = field(default_factory=Future)
    asked: bytes | None = None
    """The gateway whose answer is awaited."""
    without: set[bytes] = field(default_factory=set)
    """Gateways that don't have it."""


class AdapterFetch:
    """Called by loader threads; the engine's loop carries the questions to the gateways, one gateway at a time, and the answers back."""

    def __init__(self, contents: ContentStore, wake: Callable[[], None], timeout_s: float = FETCH_TIMEOUT_S) -> None:
        self._contents = contents
        self._wake = wake
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._wants: dict[str, _Want] = {}
        self._closed = False

    def fetch(self, digest: str) -> tuple[bytes, bytes]:
        """adapter_config.json and adapter_model.safetensors, verified and kept on disk. Blocks.

        Raises `AdapterLoading` if no gateway has it or answers in time, `EngineFailed` if what came is something else.
        """
        try:
            return self._contents.get(digest)
        except NotFound:
            contents = self._ask(digest)
        try:
            self._contents.put(digest, contents.config, contents.tensors)
        except AdapterInvalid as error:
            raise EngineFailed(f"a gateway sent other bytes than those of adapter {digest}") from error
        return contents

    def questions(self, gateways: Collection[bytes]) -> list[tuple[bytes, str]]:
        """(gateway, digest) to be asked now. A digest that none of the gateways has is given up; without a gateway all wait."""
        with self._lock:
            if not gateways:
                return []
            chosen = [(self._choose(digest, want, gateways), digest) for digest, want in list(self._wants.items())]
        return [(gateway, digest) for gateway, digest in chosen if gateway is not None]

    def answer(self, gateway: bytes, message: AdapterBytes) -> None:
        """An answer nobody waits for any more is ignored."""
        with self._lock:
            want = self._wants.get(message.digest)
            if want is None:
                return
            if message.config is not None:
                del self._wants[message.digest]
                want.contents.set_result(Contents(message.config, message.tensors))
            elif want.asked == gateway:
                want.without.add(gateway)
                want.asked = None

    def close(self) -> None:
        """Give up all that is waited for, and whatever would be from here on."""
        with self._lock:
            self._closed = True
            for want in self._wants.values():
                want.contents.set_exception(AdapterLoading(_STOPPING))
            self._wants.clear()

    def _ask(self, digest: str) -> Contents:
        with self._lock:
            if self._closed:
                raise AdapterLoading(_STOPPING)
            want = self._wants.setdefault(digest, _Want())
        self._wake()
        try:
            return want.contents.result(self._timeout_s)
        except TimeoutError:
            raise AdapterLoading(f"no gateway sent the adapter {digest} within {self._timeout_s:.0f} s") from None
        finally:
            with self._lock:
                if self._wants.get(digest) is want:
                    del self._wants[digest]

    def _choose(self, digest: str, want: _Want, gateways: Collection[bytes]) -> bytes | None:
        """Whom to ask now; None while an answer is awaited, and once nobody is left to ask."""
        if want.asked in gateways:
            return None
        want.asked = next((gateway for gateway in gateways if gateway not in want.without), None)
        if want.asked is None:
            del self._wants[digest]
            log.error("no gateway has an adapter's bytes", extra={"fields": {"digest": digest}})
            want.contents.set_exception(AdapterLoading(f"no gateway has the bytes of adapter {digest}"))
        return want.asked
