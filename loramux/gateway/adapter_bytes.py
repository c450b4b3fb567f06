"""Adapter bytes of this data directory and the versions that name them: kept before they are named, freed when no version does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from loramux.adapters.contents import Contents, ContentStore
from loramux.adapters.registry import Registry
from loramux.errors import StoreUnavailable

log = logging.getLogger("loramux.gateway")

_OTHER_STORES = "other-stores"


class AdapterBytes:
    """Of one gateway, which alone has the data directory. Nothing is freed while bytes that were kept are not named yet.

    Bytes are freed only where the embedded store alone has ever named contents of this directory: another store may name what this
    one does not. The engine that reads them fetches again what is freed between its look and its read, and finds it gone.
    """

    def __init__(self, contents: ContentStore, registry: Registry, data_dir: Path, store_url: str) -> None:
        self._contents, self._registry = contents, registry
        self._lock = asyncio.Lock()
        if store_url != "embedded":
            (data_dir / _OTHER_STORES).touch()
        self._may_free = not (data_dir / _OTHER_STORES).exists()

    @asynccontextmanager
    async def kept(self, digest: str, contents: Contents) -> AsyncIterator[None]:
        """Have the bytes on disk; the caller names them before it leaves."""
        async with self._lock:
            await asyncio.to_thread(self._contents.put, digest, *contents)
            yield

    async def free_unnamed(self) -> None:
        """Free what no version names: of deleted versions, or of registrations cut off half-way. Raises StoreUnavailable."""
        if not self._may_free:
            return
        async with self._lock:
            named = await self._registry.digests()
            for digest in self._contents.digests() - named:
                await asyncio.to_thread(self._contents.delete, digest)

    async def free_after_deletion(self) -> None:
        """As `free_unnamed`; the deletion has succeeded whatever becomes of the bytes, which the next start frees."""
        try:
            await self.free_unnamed()
        except (StoreUnavailable, OSError):
            log.warning("the bytes of a deleted adapter were not freed", exc_info=True)
