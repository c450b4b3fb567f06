"""Where the engine's adapters are: the operator's wishes carried out, and every change told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from loramux.adapters.types import Tier
from loramux.engine.protocol import Placed
from loramux.engine.slot_turns import SlotTurns
from loramux.engine.types import AdapterResidency
from loramux.errors import AdapterInvalid, AdapterLoading, Conflict, EngineFailed, LoramuxError
from loramux.lora.host_cache import HostCache
from loramux.lora.slots import SlotTable
from loramux.lora.types import HostAdapter

log = logging.getLogger(__name__)


@dataclass
class _Placement:
    """An adapter on its way to a tier; it is used in host memory until it is there."""

    operation_id: str
    digest: str
    tier: Tier
    pinned: bool | None
    adapter: Future[HostAdapter]
    answered: bool = False
    """Failed before the adapter was loaded, which is given back when it is."""


class AdapterResidencies:
    """What has a slot is in host memory too: an adapter that leaves host memory is taken out of its slot, and the pin of a slot is a pin
    in host memory. Not thread-safe; `wake` is called from other threads when `advance` has something to do.
    """

    def __init__(self, adapters: HostCache[HostAdapter], slots: SlotTable, turns: SlotTurns, wake: Callable[[], None]) -> None:
        self._adapters = adapters
        self._slots = slots
        self._turns = turns
        self._wake = wake
        self._loading: list[_Placement] = []
        self._waiting_for_slot: list[_Placement] = []
        self._placed: list[Placed] = []
        self._left_host: set[str] = set()
        """Adapters to be taken out of their slots as soon as nobody uses them there."""
        self._changed: set[str] = set()
        self._told: dict[str, AdapterResidency] = {}

    @property
    def has_work(self) -> bool:
        return any(each.adapter.done() for each in self._loading)

    @property
    def num_placements(self) -> int:
        return len(self._loading) + len(self._waiting_for_slot)

    def place(self, operation_id: str, digest: str, tier: Tier, pinned: bool | None) -> None:
        """Begin to bring an adapter to a tier; what comes of it is in `take_placed`."""
        placement = _Placement(operation_id, digest, tier, pinned, self._adapters.acquire(digest))
        self._loading.append(placement)
        placement.adapter.add_done_callback(lambda _: self._wake())

    def drop(self, digest: str) -> None:
        """Unpin an adapter, call off its placements, and free it once no request uses it."""
        for placement in [each for each in self._loading if each.digest == digest and not each.answered]:
            placement.answered = True
            self._answer(placement, Conflict("the adapter was dropped while it was loaded"))
        for placement in [each for each in self._waiting_for_slot if each.digest == digest]:
            self._waiting_for_slot.remove(placement)
            self._adapters.release(digest)
            self._answer(placement, Conflict("the adapter was dropped while it waited for a slot"))
        self._turns.cancel_placing(digest)
        self._slots.unpin(digest)
        self._adapters.drop(digest)

    def advance(self) -> None:
        """Take up what has been loaded. To be called before a step is scheduled."""
        self._follow_host()
        loaded = [each for each in self._loading if each.adapter.done()]
        self._loading = [each for each in self._loading if each not in loaded]
        for placement in loaded:
            self._arrive(placement)

    def take_placed(self) -> list[Placed]:
        """Placements that have succeeded or failed since this was last asked."""
        for placement in [each for each in self._waiting_for_slot if not self._turns.is_placing(each.digest)]:
            self._waiting_for_slot.remove(placement)
            self._finish(placement)
        placed, self._placed = self._placed, []
        return placed

    def take_changes(self) -> list[AdapterResidency]:
        """Adapters that are elsewhere, or otherwise there, than when this was last asked."""
        self._follow_host()
        changed = self._changed | self._slots.take_changed()
        self._changed = set()
        return [each for digest in sorted(changed) if (each := self._update(digest))]

    def told(self) -> tuple[AdapterResidency, ...]:
        """Every adapter that is there, or on its way, as `take_changes` has told."""
        return tuple(self._told.values())

    def misfit(self, adapter: HostAdapter) -> LoramuxError | None:
        """Why the adapter can't have a slot, however long it waits."""
        num_pages, most_pages = self._slots.num_pages, self._slots.most_pages
        if num_pages is None or most_pages is None or self._slots.is_pinned(adapter.digest) or adapter.num_pages <= most_pages:
            return None
        if adapter.num_pages > num_pages:
            return AdapterInvalid(f"the adapter takes {adapter.num_pages} pages of the device's memory, adapters have {num_pages} in all")
        return AdapterLoading(f"the adapter takes {adapter.num_pages} pages of the device's memory, pins leave {most_pages}")

    def _follow_host(self) -> None:
        changed = self._adapters.take_changed()
        self._changed |= changed
        self._left_host |= changed
        for digest in list(self._left_host):
            if self._adapters.state(digest) is not None:
                self._left_host.remove(digest)
            elif not self._slots.num_users(digest):
                self._slots.forget(digest)
                self._left_host.remove(digest)

    def _arrive(self, placement: _Placement) -> None:
        """The adapter is in host memory, or could not be loaded."""
        error = placement.adapter.exception()
        if error is not None:
            if not placement.answered:
                self._answer(placement, error)
        elif placement.answered:
            self._adapters.release(placement.digest)
        else:
            self._move_on(placement, placement.adapter.result())

    def _move_on(self, placement: _Placement, adapter: HostAdapter) -> None:
        self._adapters.keep(placement.digest)
        try:
            if placement.tier == "device" and (misfit := self.misfit(adapter)):
                raise misfit
            self._set_pin(placement, adapter)
        except LoramuxError as error:
            self._adapters.release(placement.digest)
            self._answer(placement, error)
            return
        if placement.tier == "device":
            self._turns.place(placement.digest, adapter.num_pages)
            self._waiting_for_slot.append(placement)
        else:
            self._finish(placement)

    def _set_pin(self, placement: _Placement, adapter: HostAdapter) -> None:
        """Raises `Conflict`, and leaves the pins as they were."""
        digest, pinned = placement.digest, placement.pinned
        if pinned is None:
            return
        pin_slot = pinned and placement.tier == "device"
        if pin_slot:
            self._slots.pin(digest, adapter.num_pages)
        try:
            if pinned:
                self._adapters.pin(digest)
        except Conflict:
            self._slots.unpin(digest)  # without a pin in host memory there was none before
            raise
        if not pin_slot:
            self._slots.unpin(digest)
        if not pinned:
            self._adapters.unpin(digest)

    def _finish(self, placement: _Placement) -> None:
        self._adapters.release(placement.digest)
        self._answer(placement, None)

    def _answer(self, placement: _Placement, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, LoramuxError):
            log.error("an adapter could not be loaded", exc_info=error, extra={"fields": {"digest": placement.digest}})
            error = EngineFailed("the adapter could not be loaded")
        self._placed.append(Placed(placement.operation_id, error.to_failure() if error else None))

    def _update(self, digest: str) -> AdapterResidency | None:
        """What is to be told of the adapter, None if that has been told."""
        before, now = self._told.get(digest, _gone(digest)), self._describe(digest)
        if now == before:
            return None
        if now.is_gone:
            del self._told[digest]
        else:
            self._told[digest] = now
        _log_change(before, now)
        return now

    def _describe(self, digest: str) -> AdapterResidency:
        state = self._adapters.state(digest)
        if state is None:
            return _gone(digest)
        if state.value is None:
            return AdapterResidency(digest, "none", "loading")
        return AdapterResidency(
            digest=digest,
            tier="device" if self._slots.holds(digest) else "host",
            state="draining" if state.dropped else "ready",
            pinned=state.pinned,
            num_bytes=state.value.num_bytes,
            rank=state.value.rank,
        )


def _gone(digest: str) -> AdapterResidency:
    return AdapterResidency(digest, "none")


def _log_change(before: AdapterResidency, now: AdapterResidency) -> None:
    """Slots may change hands many times a second: that alone is no news."""
    only_slot = before.tier != "none" != now.tier and (before.state, before.pinned) == (now.state, now.pinned)
    fields = {"digest": now.digest, "tier": now.tier, "state": now.state, "pinned": now.pinned, "num_bytes": now.num_bytes}
    log.log(logging.DEBUG if only_slot else logging.INFO, "an adapter has moved", extra={"fields": fields})
