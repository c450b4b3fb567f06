"""Adapters where the operator wants them: placed when asked for, and again on an engine that has restarted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from loramux.adapters.registry import Registry, Wanted
from loramux.adapters.types import AdapterVersion, Tier
from loramux.engine.interface import Engine
from loramux.engine.types import EngineInfo
from loramux.errors import Conflict, LoramuxError, NoEngine, NotFound
from loramux.gateway.adapter_bytes import AdapterBytes

log = logging.getLogger("loramux.gateway")

_LOOK_S = 0.25
_RETRY_S = 5.0


class Placing:
    """Of one gateway, which runs inside `kept`."""

    def __init__(self, engine: Engine, registry: Registry, adapter_bytes: AdapterBytes) -> None:
        self._engine, self._registry, self._adapter_bytes = engine, registry, adapter_bytes
        self._epoch = ""
        """Of the run of the engine that the next two are about."""
        self._placed: set[Wanted] = set()
        self._is_complete = False
        self._stopping = asyncio.Event()
        self._restoring = asyncio.Lock()
        """Held while pins are put back, so that none is that has just been taken away."""

    async def place(self, version: AdapterVersion, tier: Tier, *, pinned: bool) -> None:
        """Return once the engine has it there, and keep that as wanted.

        Raises `Conflict` for a version that is draining or of another base, and where pins would leave nothing for others; `NotFound`
        if it was deleted meanwhile; `NoEngine`, and what the engine failed with.
        """
        self._check(version)
        await self._engine.place(version.digest, tier, pinned=True if pinned else None)
        try:
            await self._registry.want(version.name, version.version, tier, pinned=pinned)
        except (NotFound, Conflict):  # drained or deleted meanwhile
            await self._adapter_bytes.free_after_change()
            raise

    async def unpin(self, version: AdapterVersion) -> None:
        """Raises `NotFound`. An engine keeps the pin for as long as another version of the same content is pinned."""
        async with self._restoring:
            await self._registry.unpin(version.name, version.version)
            wanted = await self._registry.wanted(version.base_digest)
        residency = self._engine.residency.get(version.digest)
        if residency is not None and residency.pinned and not any(each.pinned and each.digest == version.digest for each in wanted):
            await self._engine.place(version.digest, "host", pinned=False)

    def _check(self, version: AdapterVersion) -> None:
        if version.state == "draining":
            raise Conflict(f"{version.id} is draining; register it again first")
        if self._engine.info is None:
            raise NoEngine("No engine is ready.")
        if version.base_digest != self._engine.info.base.digest:
            raise Conflict(f"{version.id} is of another base than the one served")

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Meanwhile an engine that has started gets what is wanted, and what could not be freed at once is freed."""
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            self._stopping.set()  # the store's client may swallow the cancellation while it connects
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep(self) -> None:
        while not self._stopping.is_set():
            pause_s = _LOOK_S if await self._look() else _RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _look(self) -> bool:
        """Whether nothing is left to try again."""
        try:
            if self._adapter_bytes.is_due:
                await self._adapter_bytes.free()
            info = self._engine.info
            return info is None or await self._restored(info)
        except Exception:
            log.warning("adapters may not be where they are wanted", exc_info=True)
            return False

    async def _restored(self, info: EngineInfo) -> bool:
        """Whether everything wanted has been placed on this run of the engine, after trying what has not."""
        if info.epoch != self._epoch:
            self._epoch, self._placed, self._is_complete = info.epoch, set(), False
        if self._is_complete:
            return True
        async with self._restoring:
            wanted = await self._registry.wanted(info.base.digest)
            for each in wanted:
                if each not in self._placed:
                    await self._try(each)
        await self._adapter_bytes.free()  # what was drained or deleted meanwhile
        self._is_complete = self._placed.issuperset(wanted)
        return self._is_complete

    async def _try(self, wanted: Wanted) -> None:
        try:
            await self._engine.place(wanted.digest, wanted.tier, pinned=True if wanted.pinned else None)
            self._placed.add(wanted)
        except LoramuxError as error:
            fields = {"digest": wanted.digest, "tier": wanted.tier, "pinned": wanted.pinned, "code": error.code}
            log.warning(f"an adapter is not where it is wanted: {error.message}", extra={"fields": fields})
