"""The device's adapter slots, counted by the sequences that run on them."""

from __future__ import annotations

from collections import OrderedDict


class SlotTable:
    """A slot that a sequence uses is never reassigned. An idle one keeps its adapter until it is the least recently used of the idle
    ones and another adapter needs it. The base model takes no slot.
    """

    def __init__(self, num_slots: int) -> None:
        self._digests: list[str | None] = [None] * num_slots
        self._num_users = [0] * num_slots
        self._slot_of: dict[str, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        """Least recently used first."""

    @property
    def num_slots(self) -> int:
        return len(self._digests)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._idle)

    def can_acquire(self, digest: str) -> bool:
        return digest in self._slot_of or bool(self._idle)

    def acquire(self, digest: str) -> int:
        """Count one more user of the adapter's slot, giving it an idle slot if it has none. Requires `can_acquire`."""
        slot = self._slot_of.get(digest)
        if slot is None:
            slot = self._assign(digest)
        self._idle.pop(slot, None)
        self._num_users[slot] += 1
        return slot

    def release(self, digest: str) -> None:
        """Undo one `acquire`. Raises KeyError if there is none to undo."""
        slot = self._slot_of[digest]
        if self._num_users[slot] == 0:
            raise KeyError(f"slot {slot} of {digest} has no user")
        self._num_users[slot] -= 1
        if self._num_users[slot] == 0:
            self._idle[slot] = None

    def digest_of(self, slot: int) -> str | None:
        return self._digests[slot]

    def check_integrity(self) -> None:
        """Raise AssertionError unless maps and counts agree. For tests."""
        assert self._slot_of == {digest: slot for slot, digest in enumerate(self._digests) if digest is not None}
        assert set(self._idle) == {slot for slot, count in enumerate(self._num_users) if count == 0}
        assert all(count >= 0 for count in self._num_users)
        assert all(self._digests[slot] is not None for slot, count in enumerate(self._num_users) if count)

    def _assign(self, digest: str) -> int:
        slot, _ = self._idle.popitem(last=False)
        previous = self._digests[slot]
        if previous is not None:
            del self._slot_of[previous]
        self._digests[slot] = digest
        self._slot_of[digest] = slot
        return slot
