from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loramux.errors import Conflict
from loramux.lora.slots import SlotTable


def test_an_idle_slot_keeps_its_adapter_until_another_needs_it() -> None:
    slots = SlotTable(2)
    first = slots.acquire("a")
    slots.release("a")
    assert slots.num_used == 0 and slots.digest_of(first) == "a"
    second = slots.acquire("b")
    assert second != first
    assert slots.acquire("a") == first
    assert slots.num_used == 2 and not slots.can_acquire("c") and slots.can_acquire("b")
    slots.release("b")
    assert slots.can_acquire("c") and slots.acquire("c") == second
    assert slots.digest_of(second) == "c"
    slots.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    slots = SlotTable(3)
    held = {digest: slots.acquire(digest) for digest in "abc"}
    for digest in "bca":
        slots.release(digest)
    slots.acquire("b")
    slots.release("b")
    assert slots.acquire("d") == held["c"]
    assert slots.acquire("e") == held["a"]
    assert slots.acquire("b") == held["b"]


def test_what_was_not_acquired_cannot_be_released() -> None:
    slots = SlotTable(1)
    with pytest.raises(KeyError):
        slots.release("a")
    slots.acquire("a")
    slots.release("a")
    with pytest.raises(KeyError):
        slots.release("a")
    slots.check_integrity()


def test_no_slots_at_all() -> None:
    assert not SlotTable(0).can_acquire("a")


def test_a_pinned_adapter_keeps_its_idle_slot() -> None:
    slots = SlotTable(2)
    slots.pin("a")
    first = slots.acquire("a")
    slots.release("a")
    for digest in "bcb":
        assert slots.acquire(digest) != first
        assert not slots.can_acquire("d")
        slots.release(digest)
    with pytest.raises(Conflict, match="one of the 2"):
        slots.pin("b")
    slots.unpin("a")
    slots.pin("b")
    assert slots.acquire("c") == first
    slots.check_integrity()


def test_one_slot_can_not_be_pinned() -> None:
    with pytest.raises(Conflict):
        SlotTable(1).pin("a")


def test_an_adapter_forgotten_leaves_an_empty_slot_which_goes_first() -> None:
    slots = SlotTable(2, 4)
    for digest in "ab":
        slots.acquire(digest, 2)
        slots.release(digest)
    slots.forget("b")
    slots.forget("unknown")
    assert not slots.holds("b") and slots.num_pages_used == 2
    slots.acquire("c", 2)
    assert slots.holds("a")
    with pytest.raises(ValueError, match="in use"):
        slots.forget("c")
    slots.check_integrity()


def test_pages_are_proportional_to_the_adapter_and_never_shared() -> None:
    slots = SlotTable(4, 8)
    sizes = {"a": 1, "b": 2, "c": 4}
    held = {digest: slots.acquire(digest, size) for digest, size in sizes.items()}
    pages = [page for slot in held.values() for page in slots.pages_of(slot)]
    assert len(set(pages)) == len(pages) == 7 and set(pages) < set(range(8))
    assert not slots.can_acquire("d", 2) and slots.can_acquire("d", 1) and slots.can_acquire("a", 100)
    assert slots.can_acquire("d", 3, without=["b"]) and not slots.can_acquire("d", 4, without=["b"])
    slots.release("a")
    slots.release("b")
    slots.acquire("d", 4)
    assert not slots.holds("a") and not slots.holds("b")
    assert slots.num_pages_used == 8
    slots.check_integrity()


def test_pins_leave_pages_for_the_largest_expected() -> None:
    slots = SlotTable(4, 10)
    slots.expect(5)
    slots.pin("a", 3)
    with pytest.raises(Conflict, match="memory"):
        slots.pin("b", 3)
    slots.pin("c", 2)
    assert slots.most_pages == 5
    slots.unpin("a")
    assert slots.most_pages == 8


def test_what_changed_is_told_once() -> None:
    slots = SlotTable(1)
    slots.acquire("a")
    slots.release("a")
    assert slots.take_changed() == {"a"}
    slots.acquire("b")
    assert slots.take_changed() == {"a", "b"}
    assert slots.take_changed() == set()


class Slots(RuleBasedStateMachine):
    """Against a dictionary of who uses what: an adapter in use or pinned keeps its slot, and no slot or page serves two."""

    PAGES: ClassVar = dict(zip("abcdef", (1, 1, 2, 2, 3, 4), strict=True))

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotTable(3, 6)
        self.slots.expect(4)
        self.users: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.pinned: set[str] = set()

    @rule(digest=st.sampled_from("abcdef"))
    def acquire(self, digest: str) -> None:
        kept = set(self.held) | {each for each in self.pinned if self.slots.holds(each)}
        fits = len(kept) < 3 and sum(self.PAGES[each] for each in kept) + self.PAGES[digest] <= 6
        possible = self.slots.holds(digest) or fits
        assert self.slots.can_acquire(digest, self.PAGES[digest]) is possible
        if possible:
            slot = self.slots.acquire(digest, self.PAGES[digest])
            assert self.held.setdefault(digest, slot) == slot
            self.users[digest] = self.users.get(digest, 0) + 1

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.users)))
        self.slots.release(digest)
        self.users[digest] -= 1
        if not self.users[digest]:
            del self.users[digest], self.held[digest]

    @rule(digest=st.sampled_from("abcdef"))
    def pin(self, digest: str) -> None:
        others = self.pinned - {digest}
        possible = len(others) < 2 and sum(self.PAGES[each] for each in others) + self.PAGES[digest] <= 2
        if possible or digest in self.pinned:
            self.slots.pin(digest, self.PAGES[digest])
            self.pinned.add(digest)
        else:
            with pytest.raises(Conflict):
                self.slots.pin(digest, self.PAGES[digest])

    @rule(digest=st.sampled_from("abcdef"))
    def unpin(self, digest: str) -> None:
        self.slots.unpin(digest)
        self.pinned.discard(digest)

    @rule(digest=st.sampled_from("abcdef"))
    def forget(self, digest: str) -> None:
        if digest not in self.held:
            self.slots.forget(digest)
            assert not self.slots.holds(digest)

    @invariant()
    def agree(self) -> None:
        self.slots.check_integrity()
        assert self.slots.num_used == len(self.held) == len(set(self.held.values()))
        assert all(self.slots.digest_of(slot) == digest for digest, slot in self.held.items())
        assert all(len(self.slots.pages_of(slot)) == self.PAGES[digest] for digest, slot in self.held.items())
        assert self.slots.most_pages == 6 - sum(self.PAGES[digest] for digest in self.pinned)


TestSlots = Slots.TestCase
TestSlots.settings = settings(deadline=None, max_examples=40)
