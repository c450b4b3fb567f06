"""Adapter bytes of this data directory and of the engine, and the versions that name them: kept before they are named, freed when no
version does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from pathlib import Path

from loramux.adapters.contents import Contents, ContentStore
from loramux.adapters.registry import Registry
from loramux.engine.interface import Engine
from loramux.errors import StoreUnavailable
from loramux.gateway.in_flight import InFlight

log = logging.getLogger("loramux.gateway")

_OTHER_STORES = "other-stores"


class AdapterBytes:
    """Of one gateway, which alone has the data directory. Nothing is freed while bytes that were kept are not named yet, nor while a
    request that was resolved to them is in flight: its engine may not have read them.

    Bytes on disk are freed only where the embedded store alone has ever named contents of this directory: another store may name what
    this one does not. The engine of this host reads the directory itself and keeps no copy of its own.
    """

    def __init__(
        self, contents: ContentStore, registry: Registry, engine: Engine, in_flight: InFlight, data_dir: Path, store_url: str
    ) -> None:
        self._contents, self._registry, self._engine, self._in_flight = contents, registry, engine, in_flight
        self._lock = asyncio.Lock()
        self._failed = False
        """Whether the last `free` did."""
        self._in_use: frozenset[str] = frozenset()
        """Digests that no ready version had then, but requests in flight."""
        if store_url != "embedded":
            (data_dir / _OTHER_STORES).touch()
        self._may_free = not (data_dir / _OTHER_STORES).exists()

    @asynccontextmanager
    async def kept(self, digest: str, contents: Contents) -> AsyncIterator[None]:
        """Have the bytes on disk; the caller names them before it leaves."""
        async with self._lock:
            await asyncio.to_thread(self._contents.put, digest, *contents)
            yield

    @property
    def is_due(self) -> bool:
        """Whether `free` would free more than it did the last time."""
        return self._failed or not self._in_use <= self._in_flight.digests

    async def free(self) -> None:
        """Let the engine drop what no ready version names, and free the bytes on disk that no version names: of versions deleted or
        drained, or of registrations cut off half-way. Raises StoreUnavailable and OSError."""
        self._failed = True
        async with self._lock:
            digests = await self._registry.digests()
            self._drop_all_but(digests.served)
            in_use = self._in_flight.digests
            await self._delete_all_but(digests.named | in_use)
            self._in_use, self._failed = in_use - digests.served, False

    async def free_after_change(self) -> None:
        """As `free`; the change has succeeded whatever becomes of the bytes, which are freed later."""
        try:
            await self.free()
        except (StoreUnavailable, OSError):
            log.warning("the bytes of an adapter were not freed", exc_info=True)

    def _drop_all_but(self, served: Set[str]) -> None:
        for digest, residency in list(self._engine.residency.items()):
            if digest not in served and residency.state != "draining":
                self._engine.drop(digest)

    async def _delete_all_but(self, kept: Set[str]) -> None:
        if not self._may_free:
            return
        for digest in self._contents.digests() - kept:
            await asyncio.to_thread(self._contents.delete, digest)
