from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


class Slots(RuleBasedStateMachine):
    """Against a dictionary of who uses what: an adapter in use keeps its slot, and no slot serves two."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotTable(3)
        self.users: dict[str, int] = {}
        self.held: dict[str, int] = {}

    @rule(digest=st.sampled_from("abcdef"))
    def acquire(self, digest: str) -> None:
        possible = digest in self.held or len(self.held) < 3
        assert self.slots.can_acquire(digest) is possible
        if possible:
            slot = self.slots.acquire(digest)
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

    @invariant()
    def agree(self) -> None:
        self.slots.check_integrity()
        assert self.slots.num_used == len(self.held) == len(set(self.held.values()))
        assert all(self.slots.digest_of(slot) == digest for digest, slot in self.held.items())


TestSlots = Slots.TestCase
TestSlots.settings = settings(deadline=None, max_examples=40)
