"""More adapters than slots: everyone gets a turn, nothing is computed twice, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from loramux.engine.plan import SampledToken, StepPlan, StepResult
from loramux.engine.prefix import BLOCK_SIZE
from loramux.engine.slot_turns import SLOT_AGE_STEPS, SLOT_DRAIN_STEPS
from loramux.errors import Conflict, Failure
from tests.engine.scheduler_bench import Bench
from tests.engine.symbolic import lone_run, make_request

TURN_STEPS = 4
WAIT_STEPS = SLOT_AGE_STEPS + TURN_STEPS + SLOT_DRAIN_STEPS
"""Until the one old adapter has a slot: it ages, a turn ends, the slot is drained."""


def digest(name: str) -> str:
    return f"sha256:{name}"


class PopularLoad:
    """Keeps so many requests of each adapter in flight, all of the same tenant and priority as the others."""

    def __init__(self, bench: Bench, names: str, *, num_each: int, prompt: int = 3, max_tokens: int = 40) -> None:
        self._bench = bench
        self._num_each = num_each
        self._prompt = [1] * prompt
        self._max_tokens = max_tokens
        self._ids: dict[str, list[str]] = {name: [] for name in names}
        self._num_requests = 0

    def step(self) -> StepPlan:
        for name, ids in self._ids.items():
            ids[:] = [each for each in ids if each not in self._bench.ends]
            while len(ids) < self._num_each:
                ids.append(f"{name}{self._num_requests}")
                self._num_requests += 1
                self._bench.add(make_request(ids[-1], self._prompt, adapter_digest=digest(name), max_tokens=self._max_tokens))
        return self._bench.step()


@pytest.mark.parametrize("num_each", [1, 3])
def test_a_rare_adapter_is_served_within_a_bounded_number_of_steps(num_each: int) -> None:
    bench = Bench(num_slots=2, max_num_seqs=16)
    load = PopularLoad(bench, "ab", num_each=num_each)
    for number in range(20):
        for _ in range(7):
            load.step()
        bench.add(make_request(f"rare{number}", [1, 2], adapter_digest=digest(f"rare{number}"), max_tokens=2))
        added_at = bench.num_steps
        while f"rare{number}" not in bench.ends:
            load.step()
        assert bench.first_token_at[f"rare{number}"] - added_at <= WAIT_STEPS + 1


def test_a_rare_adapter_waits_for_prompts_under_way_but_not_for_ever() -> None:
    """Prompts of 4 steps; those that come while the slot drains aren't admitted to it."""
    bench = Bench(num_slots=1, max_num_seqs=16, budget=64, num_blocks=256)
    load = PopularLoad(bench, "a", num_each=3, prompt=190, max_tokens=30)
    for _ in range(9):
        load.step()
    bench.add(make_request("rare", [1, 2], adapter_digest=digest("rare"), max_tokens=2))
    added_at = bench.num_steps
    while "rare" not in bench.ends:
        load.step()
    assert bench.first_token_at["rare"] - added_at <= WAIT_STEPS + 1 + 3 * 4


def test_sixteen_adapters_take_turns_on_eight_slots() -> None:
    bench = Bench(num_slots=8, max_num_seqs=16, budget=512, num_blocks=128)
    requests = [make_request(f"r{index}", [index % 7] * 20, adapter_digest=digest(f"a{index}"), max_tokens=64) for index in range(16)]
    for request in requests:
        bench.add(request)
    bench.run()
    assert max(bench.first_token_at.values()) <= WAIT_STEPS + 1
    assert bench.scheduler.counters.num_preemptions == 0
    assert bench.turns.num_turns >= 16
    assert bench.runner.num_computed_tokens == sum(20 + 64 - 1 for _ in requests), "a suspended sequence was computed again"
    assert all(bench.tokens[request.id, 0] == lone_run(request)[0] for request in requests)
    assert bench.num_steps <= 2 * 64 + 2 * WAIT_STEPS


def test_a_first_token_goes_before_the_next_turn_of_others_but_not_for_ever() -> None:
    """More adapters than one slot can serve come all the time, each for one token: the long request still gets its turns."""
    bench = Bench(num_slots=1, max_num_seqs=16)
    bench.add(make_request("long", [1], adapter_digest=digest("a"), max_tokens=60))
    for step in range(300):
        if step % 3 == 0:
            bench.add(make_request(f"new{step}", [1], adapter_digest=digest(f"new{step}"), max_tokens=1))
        bench.step()
    assert len(bench.tokens["long", 0]) >= 4 * TURN_STEPS
    bench.run()


def test_a_slot_that_frees_soonest_is_drained_and_what_ends_in_time_ends() -> None:
    bench = Bench(num_slots=2)
    bench.add(make_request("long", [1], adapter_digest=digest("a"), max_tokens=100))
    bench.add(make_request("short", [1], adapter_digest=digest("b"), max_tokens=SLOT_AGE_STEPS + TURN_STEPS))
    bench.step()
    bench.add(make_request("rare", [1], adapter_digest=digest("c"), max_tokens=1))
    while "rare" not in bench.ends:
        bench.step()
        assert ("long", 0) not in bench.finish
    assert list(bench.ends) == ["short", "rare"]
    assert len(bench.tokens["long", 0]) == bench.num_steps, "the other slot was disturbed"
    bench.run()


def test_a_draining_slot_admits_nobody_and_is_reserved() -> None:
    bench = Bench(num_slots=1, budget=256)
    bench.add(make_request("a0", [1], adapter_digest=digest("a"), max_tokens=100))
    for _ in range(TURN_STEPS):
        bench.step()
    bench.add(make_request("b", [1], adapter_digest=digest("b"), max_tokens=3))
    for _ in range(SLOT_AGE_STEPS + 1):
        bench.step()
    bench.add(make_request("a1", [1], adapter_digest=digest("a"), priority=-1, max_tokens=3))
    while "b" not in bench.ends:
        bench.step()
        assert ("a1", 0) not in bench.tokens
    bench.run()
    assert list(bench.ends) == ["b", "a1", "a0"]


def test_base_requests_need_no_slot_and_lose_no_step() -> None:
    bench = Bench(num_slots=1, max_num_seqs=16, budget=256)
    load = PopularLoad(bench, "abc", num_each=2)
    load.step()
    bench.add(make_request("base", [1, 2], max_tokens=60))
    for _ in range(60):
        load.step()
    assert bench.ends["base"].end == "finished"
    assert bench.turns.num_turns > 5


def test_pins_stay_in_their_slot_and_leave_one_free() -> None:
    bench = Bench(num_slots=2, max_num_seqs=16)
    bench.slots.pin(digest("pinned"))
    with pytest.raises(Conflict, match="one of the 2 adapter slots"):
        bench.slots.pin(digest("second"))
    bench.add(make_request("p", [1], adapter_digest=digest("pinned"), max_tokens=200))
    load = PopularLoad(bench, "abc", num_each=1)
    for _ in range(200):
        load.step()
    assert len(bench.tokens["p", 0]) == 200, "a pinned slot was drained"
    served = Counter(request_id[0] for request_id, _ in bench.tokens)
    assert min(served[name] for name in "abc") >= 1
    for _ in range(30):
        load.step()
    assert bench.slots.holds(digest("pinned"))
    bench.slots.unpin(digest("pinned"))
    for _ in range(30):
        load.step()
    assert not bench.slots.holds(digest("pinned"))


def test_blocks_of_suspended_sequences_are_the_first_to_go() -> None:
    """Six blocks: the base request can only start with those of the suspended one, which is computed again, in order."""
    bench = Bench(num_slots=1, num_blocks=6, max_model_len=6 * BLOCK_SIZE, budget=256)
    first = make_request("a", [1] * 70, adapter_digest=digest("a"), max_tokens=40)
    bench.add(first)
    for _ in range(TURN_STEPS):
        bench.step()
    bench.add(make_request("b", [2], adapter_digest=digest("b"), max_tokens=20))
    while not bench.tokens["b", 0]:
        bench.step()
    assert bench.scheduler.num_suspended == 1 and bench.blocks.num_held == 3 + 1
    bench.add(make_request("base", [3] * 100, max_tokens=2))
    bench.step()
    assert bench.tokens["base", 0] and bench.scheduler.num_suspended == 0
    assert bench.scheduler.counters.num_preemptions == 1
    bench.run()
    assert bench.tokens["a", 0] == lone_run(first)[0]


def test_suspended_sequences_keep_their_blocks_where_giving_them_up_would_not_be_enough() -> None:
    bench = Bench(num_slots=1, num_blocks=6, max_model_len=6 * BLOCK_SIZE, budget=256)
    bench.add(make_request("a", [1] * 10, adapter_digest=digest("a"), max_tokens=20))
    for _ in range(TURN_STEPS):
        bench.step()
    bench.add(make_request("b", [2] * 70, adapter_digest=digest("b"), max_tokens=20))
    while not bench.tokens["b", 0]:
        bench.step()
    bench.add(make_request("base", [3] * 120, max_tokens=2))
    bench.step()
    assert bench.scheduler.num_suspended == 1 and not bench.tokens["base", 0]
    bench.run()


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("num_blocks", [5, 6, 9])
def test_tiny_pools_do_not_lock_up(num_slots: int, num_blocks: int) -> None:
    """Each sequence needs up to five blocks, and there are eight adapters: every slot turn is paid with blocks.

    Where only one fits at a time no slot is short.
    """
    bench = Bench(num_slots=num_slots, num_blocks=num_blocks, max_model_len=5 * BLOCK_SIZE, budget=16)
    requests = [
        make_request(
            f"r{index}", [index % 7] * 90, adapter_digest=digest(f"a{index}"), max_tokens=70, tenant="ab"[index % 2], n=1 + index % 2
        )
        for index in range(8)
    ]
    requests += [make_request(f"base{index}", [index] * 100, max_tokens=50) for index in range(2)]
    for request in requests:
        bench.add(request)
    bench.run(40_000)
    assert (bench.turns.num_turns > 8) == (num_slots == 1 or num_blocks == 9)
    for request in requests:
        assert [bench.tokens[request.id, index] for index in range(request.n)] == lone_run(request)


@pytest.fixture
def suspended() -> Bench:
    """Request `a` of two choices is suspended, `b` runs in the only slot."""
    bench = Bench(num_slots=1, budget=256)
    bench.add(make_request("a", [1] * 40, adapter_digest=digest("a"), n=2, max_tokens=60))
    for _ in range(TURN_STEPS + 1):
        bench.step()
    bench.add(make_request("b", [2], adapter_digest=digest("b"), max_tokens=60))
    while not bench.tokens["b", 0]:
        bench.step()
    assert bench.scheduler.num_suspended == 2
    return bench


def test_a_suspended_request_can_be_aborted(suspended: Bench) -> None:
    assert suspended.scheduler.abort("a")
    suspended.scheduler.check_integrity()
    suspended.collect()
    assert suspended.blocks.num_held == 1 and suspended.scheduler.num_suspended == 0
    suspended.run()
    assert suspended.ends["a"].end == "aborted" and suspended.ends["b"].end == "finished"
    assert len(suspended.tokens["b", 0]) == 60


def test_an_error_in_one_choice_ends_the_suspended_one_too(suspended: Bench) -> None:
    suspended.add(make_request("pair", [3], adapter_digest=digest("b"), n=2, max_tokens=60))
    while suspended.scheduler.num_suspended == 2:
        suspended.step()
    plan = suspended.scheduler.schedule()
    result = suspended.runner.run(plan)
    failure = Failure("engine_failed", "no")
    failed = [
        SampledToken(-1, error=failure) if chunk.sequence.request.request.id == "a" else sampled
        for chunk, sampled in zip(plan.chunks, result.sampled, strict=True)
    ]
    suspended.scheduler.apply(plan, StepResult(failed, result.prompt_logprobs))
    suspended.scheduler.check_integrity()
    suspended.collect()
    suspended.run()
    assert suspended.ends["a"].failure == failure and suspended.ends["pair"].end == "finished"


def test_a_drain_for_nobody_is_called_off() -> None:
    bench = Bench(num_slots=1)
    bench.add(make_request("a", [1], adapter_digest=digest("a"), max_tokens=40))
    for _ in range(TURN_STEPS):
        bench.step()
    bench.add(make_request("b", [1], adapter_digest=digest("b"), max_tokens=40))
    for _ in range(SLOT_AGE_STEPS + 1):
        bench.step()
    assert bench.scheduler.abort("b")
    bench.run()
    assert bench.num_steps == 40 and bench.turns.num_turns == 0


def test_a_reservation_for_nobody_is_given_back() -> None:
    """The seat is taken when the slot is free at last, and its heir is aborted before there is another."""
    bench = Bench(num_slots=1, max_num_seqs=2)
    bench.add(make_request("a", [1], adapter_digest=digest("a"), max_tokens=40))
    for _ in range(TURN_STEPS):
        bench.step()
    bench.add(make_request("b", [1], adapter_digest=digest("b"), max_tokens=40))
    bench.step()
    for name in ("base0", "base1"):
        bench.add(make_request(name, [1], priority=-1, max_tokens=30))
    while not bench.slots.holds(digest("b")):
        bench.step()
    assert ("b", 0) not in bench.tokens
    bench.scheduler.abort("b")
    bench.run()
    assert len(bench.tokens["a", 0]) == 40


def _run_until(bench: Bench, step: Callable[[], object], done: Callable[[], bool]) -> int:
    start = bench.num_steps
    while not done():
        step()
    return bench.num_steps - start


def test_placing_takes_an_idle_slot_at_once_and_a_used_one_in_turn() -> None:
    bench = Bench(num_slots=2, max_num_seqs=16)
    bench.turns.place(digest("x"), 0)
    bench.scheduler.schedule()
    assert not bench.turns.is_placing(digest("x")) and bench.slots.holds(digest("x"))
    load = PopularLoad(bench, "ab", num_each=2)
    for _ in range(TURN_STEPS):
        load.step()
    assert not bench.slots.holds(digest("x"))
    bench.slots.pin(digest("x"))
    bench.turns.place(digest("x"), 0)
    assert _run_until(bench, load.step, lambda: not bench.turns.is_placing(digest("x"))) <= WAIT_STEPS + 1
    for _ in range(20):
        load.step()
        assert bench.slots.holds(digest("x"))


def test_placing_can_be_called_off() -> None:
    bench = Bench(num_slots=1)
    bench.add(make_request("a", [1], adapter_digest=digest("a"), max_tokens=40))
    for _ in range(TURN_STEPS):
        bench.step()
    bench.turns.place(digest("x"), 0)
    bench.step()
    bench.turns.cancel_placing(digest("x"))
    bench.turns.cancel_placing(digest("x"))
    bench.run()
    assert bench.num_steps == 40


def test_an_adapter_of_many_pages_gets_those_of_several_slots() -> None:
    sizes = {digest("a"): 2, digest("b"): 2, digest("c"): 2, digest("large"): 6}
    bench = Bench(num_slots=4, num_pages=7, max_num_seqs=16, pages=sizes)
    load = PopularLoad(bench, "abc", num_each=1)
    for _ in range(TURN_STEPS):
        load.step()
    assert bench.slots.num_pages_used == 6
    bench.add(make_request("r", [1], adapter_digest=digest("large"), max_tokens=2))
    assert _run_until(bench, load.step, lambda: "r" in bench.first_token_at) <= WAIT_STEPS + 1
    assert bench.turns.num_turns == 3
    slot = next(slot for slot in range(4) if bench.slots.digest_of(slot) == digest("large"))
    assert len(bench.slots.pages_of(slot)) == 6
    num_before = Counter(request_id[0] for request_id in bench.ends)
    for _ in range(80):
        load.step()
    num_after = Counter(request_id[0] for request_id in bench.ends)
    assert all(num_after[name] > num_before[name] for name in "abc")
