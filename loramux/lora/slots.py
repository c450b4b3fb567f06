"""The device's adapter slots, counted by the sequences that run on them, and the pages of memory that they take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from loramux.errors import Conflict


class SlotTable:
    """A slot that a sequence uses is never reassigned. An idle one keeps its adapter until it is the least recently used of the idle
    ones and another adapter needs the slot, or its pages. The base model takes no slot.

    An adapter pinned by the operator keeps its slot when it is idle. Pins leave a slot free, and pages for the largest adapter expected.

    Where the device has memory of its own its pages are counted: `num_pages` is the size of the pool. Without it nothing is counted.
    """

    def __init__(self, num_slots: int, num_pages: int | None = None) -> None:
        self._digests: list[str | None] = [None] * num_slots
        self._num_users = [0] * num_slots
        self._pages: list[tuple[int, ...]] = [()] * num_slots
        self._slot_of: dict[str, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        """Without users, least recently used first."""
        self._pinned: dict[str, int] = {}
        """Digest to pages, of adapters that have a slot or are yet to get one."""
        self._num_pages = num_pages
        self._largest_pages = 0
        self._free_pages = list(range(num_pages or 0))
        self._changed: set[str] = set()

    @property
    def num_slots(self) -> int:
        return len(self._digests)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._idle)

    @property
    def num_pages_used(self) -> int:
        return sum(len(pages) for pages in self._pages)

    @property
    def num_pages(self) -> int | None:
        return self._num_pages

    @property
    def most_pages(self) -> int | None:
        """What the largest adapter may take beside the pins; None where pages are not counted."""
        return None if self._num_pages is None else self._num_pages - sum(self._pinned.values())

    def holds(self, digest: str) -> bool:
        return digest in self._slot_of

    def num_users(self, digest: str) -> int:
        slot = self._slot_of.get(digest)
        return 0 if slot is None else self._num_users[slot]

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    def can_acquire(self, digest: str, num_pages: int = 0, *, without: Collection[str] = ()) -> bool:
        """Whether the adapter has a slot, or there would be one, with enough pages, if those in `without` were idle."""
        if digest in self._slot_of:
            return True
        takeable = {slot for slot in self._idle if self._is_takeable(slot)} | {self._slot_of[other] for other in without}
        return bool(takeable) and self._lacks_pages(num_pages) <= sum(len(self._pages[slot]) for slot in takeable)

    def acquire(self, digest: str, num_pages: int = 0) -> int:
        """Count one more user of the adapter's slot, giving it an idle slot and pages if it has none. Requires `can_acquire`."""
        slot = self._slot_of.get(digest)
        if slot is None:
            slot = self._assign(digest, num_pages)
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

    def expect(self, num_pages: int) -> None:
        """Leave so many pages, whatever is pinned from now on."""
        self._largest_pages = max(self._largest_pages, num_pages)

    def pin(self, digest: str, num_pages: int = 0) -> None:
        """Keep the adapter in the slot that it has, or gets with the next `acquire`. Raises `Conflict` if that left too little."""
        if digest in self._pinned:
            return
        if len(self._pinned) + 1 >= self.num_slots:
            raise Conflict(f"pins must leave one of the {self.num_slots} adapter slots free")
        most_pages = self.most_pages
        if most_pages is not None and most_pages - num_pages < max(num_pages, self._largest_pages):
            raise Conflict("pins would leave too little of the adapters' memory for others")
        self._pinned[digest] = num_pages
        self._changed.add(digest)

    def unpin(self, digest: str) -> None:
        """Nothing happens if it is not pinned."""
        if self._pinned.pop(digest, None) is not None:
            self._changed.add(digest)

    def forget(self, digest: str) -> None:
        """Take an adapter without users out of its slot; nothing happens if it has none."""
        slot = self._slot_of.get(digest)
        if slot is None:
            return
        if self._num_users[slot]:
            raise ValueError(f"slot {slot} of {digest} is in use")
        self._vacate(slot)

    def digest_of(self, slot: int) -> str | None:
        return self._digests[slot]

    def pages_of(self, slot: int) -> tuple[int, ...]:
        """Ids of the pages that the slot's adapter has, from 0 to num_pages - 1."""
        return self._pages[slot]

    def take_changed(self) -> set[str]:
        """Adapters that got or lost a slot or a pin since this was last asked."""
        changed, self._changed = self._changed, set()
        return changed

    def check_integrity(self) -> None:
        """Raise AssertionError unless maps and counts agree. For tests."""
        assert self._slot_of == {digest: slot for slot, digest in enumerate(self._digests) if digest is not None}
        assert set(self._idle) == {slot for slot, count in enumerate(self._num_users) if count == 0}
        assert all(count >= 0 for count in self._num_users)
        assert all(self._digests[slot] is not None for slot, count in enumerate(self._num_users) if count)
        assert all(digest is not None or not pages for digest, pages in zip(self._digests, self._pages, strict=True))
        pages = self._free_pages + [page for pages in self._pages for page in pages]
        assert sorted(pages) == list(range(self._num_pages or 0)), "a page is lost, or given twice"
        assert len(self._pinned) < max(1, self.num_slots)

    def _is_takeable(self, slot: int) -> bool:
        return self._digests[slot] not in self._pinned

    def _lacks_pages(self, num_pages: int) -> int:
        return 0 if self._num_pages is None else max(0, num_pages - len(self._free_pages))

    def _assign(self, digest: str, num_pages: int) -> int:
        """Take an empty slot, else the first that may go, and evict further adapters until there are pages enough."""
        takeable = sorted(filter(self._is_takeable, self._idle), key=lambda slot: self._digests[slot] is not None)
        slot = takeable.pop(0)
        self._vacate(slot)
        while self._lacks_pages(num_pages):
            self._vacate(takeable.pop(0))
        self._digests[slot] = digest
        self._slot_of[digest] = slot
        if self._num_pages is not None:
            self._pages[slot] = tuple(self._free_pages.pop() for _ in range(num_pages))
        self._changed.add(digest)
        return slot

    def _vacate(self, slot: int) -> None:
        digest = self._digests[slot]
        if digest is None:
            return
        self._free_pages += self._pages[slot]
        self._pages[slot] = ()
        self._digests[slot] = None
        del self._slot_of[digest]
        self._changed.add(digest)
