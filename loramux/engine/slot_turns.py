"""Who gets an adapter slot where more adapters are wanted than there are slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from loramux.engine.sequence import Sequence
from loramux.lora.slots import SlotTable

SLOT_AGE_STEPS = 1
"""How long an adapter is passed over before a slot is drained for it."""
SLOT_DRAIN_STEPS = 1
"""How long a draining slot lets its sequences go on: those about to finish do."""
FIRST_TOKEN_STEPS = 16
"""An adapter that a first token depends on counts as passed over so much longer. With 16 streams over 16 adapters and 8 slots it makes
the median time to the first token 1.4 times that with 16 slots, instead of 2.3 (a model of step times)."""


@dataclass
class _Wait:
    """An adapter that is waited for."""

    num_pages: int
    num_waiters: int = 0
    passed_over_at: int | None = None
    """Step in which it was first passed over for lack of a slot, less the `FIRST_TOKEN_STEPS` of one that has no token."""


@dataclass(frozen=True)
class _Drain:
    """A slot on its way from one adapter to another. It counts as a user of the slot, so that nobody else gets it."""

    to_digest: str
    since: int


class SlotTurns:
    """Shares slots in turns, so that popular adapters can't starve a rare one.

    An adapter ages from the step in which a waiting sequence was first passed over for lack of a slot. Once old it gets the next idle
    slot, and where there is none one is drained for it: of those held for `turn_steps` steps or longer, not pinned, the one whose
    sequences have the fewest tokens left. A draining slot admits nobody. After `SLOT_DRAIN_STEPS` its sequences yield it, each once it
    has got a token in this turn: so a turn always gets somewhere, however long the prompt. The freed slot is reserved: its next
    adapter counts as a user until a sequence takes it, or nobody waits any more. The oldest goes first, one for which a sequence waits
    that has no token yet being `FIRST_TOKEN_STEPS` older than it is: so nobody is overtaken by those that come later than that.
    """

    def __init__(self, slots: SlotTable, turn_steps: int) -> None:
        self._slots = slots
        self._turn_steps = turn_steps
        self._step = 0
        self._waits: dict[str, _Wait] = {}
        self._drains: dict[str, _Drain] = {}
        """By the adapter that gives its slot up."""
        self._reserved: set[str] = set()
        self._placing: set[str] = set()
        """Adapters to be brought to a slot that no sequence need wait for."""
        self._held_since: dict[str, int] = {}
        """Step in which sequences took the adapter's slot, while they hold it."""
        self.num_turns = 0
        """Slots that changed hands by being drained, since start."""

    # Waiting

    def enter(self, digest: str, num_pages: int) -> None:
        """One more waits for the adapter; balanced by `leave`."""
        self._slots.expect(num_pages)
        self._waits.setdefault(digest, _Wait(num_pages)).num_waiters += 1

    def leave(self, digest: str) -> None:
        wait = self._waits[digest]
        wait.num_waiters -= 1
        if not wait.num_waiters:
            del self._waits[digest]
            self._unreserve(digest)
            self._end_drains(digest)

    def can_take(self, digest: str) -> bool:
        """Whether a sequence that waits for the adapter may start on it now."""
        return digest not in self._drains and self._slots.can_acquire(digest, self._waits[digest].num_pages)

    def pass_over(self, digest: str, *, for_first_token: bool) -> None:
        """Begin to count the age of an adapter that can't be taken."""
        wait = self._waits[digest]
        now = self._step - FIRST_TOKEN_STEPS if for_first_token else self._step
        wait.passed_over_at = now if wait.passed_over_at is None else min(now, wait.passed_over_at)

    # Running

    def take(self, digest: str, num_pages: int) -> int:
        """The adapter's slot, for one more sequence. Requires `can_take`."""
        slot = self._slots.acquire(digest, num_pages)
        self._unreserve(digest)
        self._held_since.setdefault(digest, self._step)
        return slot

    def give_back(self, digest: str) -> None:
        """Undo one `take`."""
        self._slots.release(digest)
        if self._is_drained(digest):
            del self._held_since[digest]

    # Placing

    def place(self, digest: str, num_pages: int) -> None:
        """Bring the adapter to a slot, waiting like a sequence; done once it is not `is_placing` any more."""
        if digest not in self._placing:
            self._placing.add(digest)
            self.enter(digest, num_pages)

    def is_placing(self, digest: str) -> bool:
        return digest in self._placing

    def cancel_placing(self, digest: str) -> None:
        """Nothing happens if it is not being placed."""
        if digest in self._placing:
            self._placing.remove(digest)
            self.leave(digest)

    # Turns

    def begin_step(self, step: int, running: Collection[Sequence]) -> list[Sequence]:
        """Drain slots for those who have waited long. -> sequences that must yield their slots now; then call `settle`"""
        self._step = step
        self._cancel_needless()
        self.settle()
        for digest in self._old():
            self._drain_for(digest, running)
        return [sequence for sequence in running if self._must_yield(sequence)]

    def settle(self) -> None:
        """Hand over the slots that are free now: to the old, then to those that are only placed."""
        for digest in self._old():
            self._reserve(digest)
        for digest in list(self._placing):
            self._try_to_place(digest)

    def check_integrity(self, held: set[str], waiting: Mapping[str, int]) -> None:
        """Raise AssertionError unless slots are used by the adapters that sequences hold, drains and reservations, and so many sequences
        wait for each adapter. For tests."""
        self._slots.check_integrity()
        assert set(self._held_since) == held, "slots held by sequences"
        assert self._slots.num_used == len(held | set(self._drains) | self._reserved), "slots used"
        assert not self._reserved & (held | set(self._drains))
        assert self._reserved | {drain.to_digest for drain in self._drains.values()} <= set(self._waits)
        assert {digest: wait.num_waiters for digest, wait in self._waits.items()} == dict(Counter(waiting) + Counter(self._placing))

    def _old(self) -> list[str]:
        """Adapters without a slot that have waited long, the oldest first."""
        since = {digest: wait.passed_over_at for digest, wait in self._waits.items() if not self._slots.holds(digest)}
        old = {digest: step for digest, step in since.items() if step is not None and self._step - step >= SLOT_AGE_STEPS}
        return sorted(old, key=lambda digest: old[digest])

    def _cancel_needless(self) -> None:
        """Drains for an adapter that has found a slot, or of one that was pinned meanwhile."""
        for digest, drain in list(self._drains.items()):
            if self._slots.holds(drain.to_digest) or self._slots.is_pinned(digest):
                self._end_drain(digest)
        for digest, wait in self._waits.items():
            if self._slots.holds(digest) and digest not in self._drains:
                wait.passed_over_at = None

    def _reserve(self, digest: str) -> None:
        num_pages = self._waits[digest].num_pages
        drained = [each for each, drain in self._drains.items() if drain.to_digest == digest and self._is_drained(each)]
        if not self._slots.can_acquire(digest, num_pages, without=drained):
            return
        self._end_drains(digest)
        self._slots.acquire(digest, num_pages)
        self._reserved.add(digest)
        self.num_turns += len(drained)

    def _try_to_place(self, digest: str) -> None:
        if not self.can_take(digest):
            self.pass_over(digest, for_first_token=False)
            return
        self._slots.acquire(digest, self._waits[digest].num_pages)
        self._slots.release(digest)
        self.cancel_placing(digest)

    def _drain_for(self, digest: str, running: Collection[Sequence]) -> None:
        """Begin to drain as many slots as the adapter needs, or none."""
        num_pages = self._waits[digest].num_pages
        draining = [each for each, drain in self._drains.items() if drain.to_digest == digest]
        chosen: list[str] = []
        candidates = iter(self._by_tokens_left(running))
        while not self._slots.can_acquire(digest, num_pages, without=draining + chosen):
            candidate = next(candidates, None)
            if candidate is None:
                return
            chosen.append(candidate)
        for each in chosen:
            self._slots.acquire(each)
            self._drains[each] = _Drain(digest, self._step)

    def _by_tokens_left(self, running: Collection[Sequence]) -> list[str]:
        """Adapters whose turn may end, that which frees its slot soonest first."""
        tokens_left = {digest: 0 for digest in self._held_since if self._may_drain(digest)}
        for sequence in running:
            digest = sequence.adapter_digest
            if digest in tokens_left:
                tokens_left[digest] = max(tokens_left[digest], sequence.num_tokens_left)
        return sorted(tokens_left, key=lambda digest: tokens_left[digest])

    def _may_drain(self, digest: str) -> bool:
        long_held = self._step - self._held_since[digest] >= self._turn_steps
        return long_held and digest not in self._drains and not self._slots.is_pinned(digest)

    def _must_yield(self, sequence: Sequence) -> bool:
        drain = self._drains.get(sequence.adapter_digest or "")
        return drain is not None and self._step - drain.since >= SLOT_DRAIN_STEPS and sequence.has_advanced

    def _is_drained(self, digest: str) -> bool:
        """Whether no sequence holds the adapter's slot."""
        return self._slots.num_users(digest) == (digest in self._drains)

    def _end_drain(self, digest: str) -> None:
        del self._drains[digest]
        self._slots.release(digest)

    def _end_drains(self, to_digest: str) -> None:
        for digest in [each for each, drain in self._drains.items() if drain.to_digest == to_digest]:
            self._end_drain(digest)

    def _unreserve(self, digest: str) -> None:
        if digest in self._reserved:
            self._reserved.remove(digest)
            self._slots.release(digest)
