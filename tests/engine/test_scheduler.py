from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from loramux.engine.fair_queue import FairQueue
from loramux.engine.plan import SampledToken, StepResult
from loramux.engine.prefix import BLOCK_SIZE
from loramux.engine.sequence import Sequence
from loramux.engine.step_budget import PROBED_CHUNK, PROBED_CONTEXT, StepBudget, StepTimes
from loramux.engine.types import GenerationRequest, RequestEnd
from loramux.errors import Conflict, Failure
from tests.engine.scheduler_bench import Bench
from tests.engine.symbolic import VOCAB, lone_run, make_request


def test_a_request_equals_its_lone_run() -> None:
    bench = Bench()
    request = make_request("r", range(7), max_tokens=5)
    bench.add(request)
    bench.run()
    assert bench.tokens["r", 0] == lone_run(request)[0]
    assert bench.texts["r", 0] == "".join(chr(97 + token) for token in lone_run(request)[0])
    assert bench.finish["r", 0] == "length"
    assert bench.ends["r"] == RequestEnd("r", "finished", 7, 0, 5)


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    bench = Bench(budget=16)
    bench.add(make_request("short", [1], max_tokens=20))
    bench.step()
    bench.add(make_request("long", [2] * 100, max_tokens=2))
    plan = bench.step()
    assert [(chunk.sequence.request.request.id, chunk.num_tokens) for chunk in plan.chunks] == [("short", 1), ("long", 15)]
    bench.run()
    assert len(bench.tokens["short", 0]) == 20 and len(bench.tokens["long", 0]) == 2


def test_chunks_beside_decodes_are_measured_and_get_shorter_as_their_context_grows() -> None:
    seconds = {size: 0.020 + 0.001 * size for size in (1, 16, PROBED_CHUNK, 256)}
    times = StepTimes(seconds, seconds[PROBED_CHUNK] + 0.001 * PROBED_CHUNK * PROBED_CONTEXT / 200)
    bench = Bench(budget=200, times=times)
    bench.add(make_request("short", [1], max_tokens=40))
    bench.step()
    bench.add(make_request("long", [2] * 400, max_tokens=2))
    steps = [bench.step() for _ in range(6)]
    assert all(step.chunks[0].num_tokens == 1 for step in steps), "the decode goes on"
    allowed = StepBudget(200, times).of_step(1).num_tokens - 1
    lengths, start = [], 0
    for _ in steps:
        lengths.append(int(allowed / (1 + start / 200)))
        start += lengths[-1]
    assert [step.chunks[1].num_tokens for step in steps] == lengths
    bench.run()
    assert len(bench.tokens["short", 0]) == 40 and len(bench.tokens["long", 0]) == 2


def test_the_same_tenant_reads_cached_blocks_and_another_does_not() -> None:
    prompt = [3] * (2 * BLOCK_SIZE + 5)
    bench = Bench()
    bench.add(make_request("first", prompt))
    bench.run()
    bench.add(make_request("again", prompt))
    bench.add(make_request("other tenant", prompt, tenant="globex"))
    bench.add(make_request("other adapter", prompt, adapter_digest="sha256:a"))
    bench.run()
    cached = {request_id: end.num_cached_tokens for request_id, end in bench.ends.items()}
    assert cached == {"first": 0, "again": 2 * BLOCK_SIZE, "other tenant": 0, "other adapter": 0}


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_compute() -> None:
    prompt = [1] * (2 * BLOCK_SIZE)
    bench = Bench()
    for request_id in ("first", "again"):
        bench.add(make_request(request_id, prompt))
        bench.run()
    assert bench.ends["again"].num_cached_tokens == BLOCK_SIZE


def test_choices_share_the_prompt_blocks() -> None:
    bench = Bench(num_blocks=16)
    request = make_request("r", [1] * (3 * BLOCK_SIZE + 1), n=3, max_tokens=4)
    bench.add(request)
    while len(bench.tokens) < 3:
        bench.step()
    assert bench.blocks.num_held == 3 + 3  # three shared, one of its own for each choice
    bench.run()
    assert [bench.tokens["r", index] for index in range(3)] == lone_run(request)
    assert bench.runner.num_computed_tokens < 3 * BLOCK_SIZE + 1 + 3 * 8
    assert bench.ends["r"].num_completion_tokens == 12


def test_prompt_logprobs_skip_the_cache_and_cover_every_token() -> None:
    prompt = list(range(VOCAB)) * 10
    bench = Bench(budget=16)
    bench.add(make_request("warm", prompt))
    bench.run()
    bench.add(make_request("r", prompt, num_prompt_logprobs=0, n=2))
    deltas = []
    while bench.scheduler.has_work:
        plan = bench.scheduler.schedule()
        bench.scheduler.apply(plan, bench.runner.run(plan))
        outputs = bench.scheduler.take_outputs()
        deltas += outputs.deltas
    (logprobs,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert logprobs[0] is None
    assert [(entry.token_id, entry.logprob) for entry in logprobs[1:] if entry] == [(prompt[i], -float(i)) for i in range(1, 70)]
    assert outputs.ends[0].num_cached_tokens == 0


def test_stop_token_ends_with_its_id() -> None:
    bench = Bench()
    request = make_request("r", [1, 2], max_tokens=50, stop_token_ids=(3,))
    bench.add(request)
    bench.run()
    assert bench.tokens["r", 0] == lone_run(request)[0]
    assert bench.finish["r", 0] == "stop"
    assert "d" not in bench.texts["r", 0]


def test_when_blocks_run_out_the_over_served_tenant_gives_way() -> None:
    bench = Bench(num_blocks=6, max_model_len=6 * BLOCK_SIZE)
    bench.add(make_request("greedy", [1] * 3 * BLOCK_SIZE, tenant="greedy", max_tokens=60))
    for _ in range(10):
        bench.step()
    bench.add(make_request("modest", [2], tenant="modest", max_tokens=90))
    bench.run()
    assert bench.scheduler.counters.num_preemptions >= 1
    assert list(bench.ends) == ["modest", "greedy"]


def test_priority_orders_within_a_tenant_only() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(make_request("running", [1], max_tokens=2))
    bench.step()
    for request_id, tenant, priority in (("late", "acme", 5), ("soon", "acme", -5), ("other", "globex", 9)):
        bench.add(make_request(request_id, [1], tenant=tenant, priority=priority, max_tokens=2))
    bench.run()
    order = list(bench.ends)
    assert order.index("soon") < order.index("late")
    assert order.index("other") < order.index("late")


def test_a_request_without_a_free_slot_waits_and_the_base_does_not() -> None:
    bench = Bench(num_slots=1)
    bench.add(make_request("a", [1], adapter_digest="sha256:a", max_tokens=6))
    bench.step()
    bench.add(make_request("b", [1], adapter_digest="sha256:b", max_tokens=2))
    bench.add(make_request("base", [1], max_tokens=2))
    bench.step()
    assert bench.scheduler.num_running == 2 and bench.scheduler.num_waiting == 1
    bench.run()
    assert set(bench.ends) == {"a", "b", "base"}


class CountingQueue(FairQueue[Sequence]):
    num_walks = 0

    def in_order(self) -> Iterator[Sequence]:
        self.num_walks += 1
        return super().in_order()


def test_the_line_is_looked_at_only_where_a_seat_and_budget_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = CountingQueue()
    monkeypatch.setattr("loramux.engine.scheduler.FairQueue", lambda: queue)
    bench = Bench(max_num_seqs=1, budget=16)
    bench.add(make_request("long", [1] * 40, max_tokens=10))
    bench.add(make_request("next", [1], max_tokens=2))
    bench.step()
    assert queue.num_walks == 1
    while "long" not in bench.ends:
        bench.step()
    assert queue.num_walks == 1
    bench.run()
    assert list(bench.ends) == ["long", "next"]


def test_abort_returns_everything_at_once() -> None:
    bench = Bench(num_blocks=8)
    bench.add(make_request("r", [1] * 40, n=2, adapter_digest="sha256:a", max_tokens=50))
    bench.add(make_request("waiting", [1] * 200))
    bench.step()
    assert bench.scheduler.abort("r") and bench.scheduler.abort("waiting")
    assert not bench.scheduler.abort("r")
    bench.collect()
    bench.assert_empty()
    assert {end.end for end in bench.ends.values()} == {"aborted"}


def test_an_error_in_one_row_ends_that_request_alone() -> None:
    bench = Bench()
    failure = Failure("invalid_request", "no token is allowed")
    bench.add(make_request("bad", [1], n=2))
    bench.add(make_request("good", [1]))
    plan = bench.scheduler.schedule()
    result = bench.runner.run(plan)
    failed = [
        SampledToken(-1, error=failure) if c.sequence.request.request.id == "bad" else s
        for c, s in zip(plan.chunks, result.sampled, strict=True)
    ]
    bench.scheduler.apply(plan, StepResult(failed, result.prompt_logprobs))
    bench.collect()
    bench.run()
    assert bench.ends["bad"].end == "failed"
    assert bench.ends["bad"].failure == failure
    assert bench.ends["good"].end == "finished"


ADAPTERS = {f"sha256:{name}": num_pages for name, num_pages in zip("abcde", (1, 1, 2, 3, 5), strict=True)}
"""Digest to pages."""


def _random_operation(rng: random.Random, bench: Bench) -> None:
    """One of the operator's."""
    digest, num_pages = rng.choice(list(ADAPTERS.items()))
    match rng.choice(["pin", "unpin", "place", "drop"]):
        case "pin":
            with contextlib.suppress(Conflict):
                bench.slots.pin(digest, num_pages)
        case "unpin":
            bench.slots.unpin(digest)
        case "place":
            bench.turns.place(digest, num_pages)
        case "drop":
            bench.slots.unpin(digest)
            bench.turns.cancel_placing(digest)
            if not bench.slots.num_users(digest):
                bench.slots.forget(digest)


def _random_request(rng: random.Random, request_id: str, prefixes: list[list[int]]) -> GenerationRequest:
    tenant = rng.choice(["acme", "globex", "initech"])
    prompt = (rng.choice(prefixes) + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 20))])[: rng.randrange(1, 130)]
    return make_request(
        request_id,
        prompt or [0],
        tenant=tenant,
        adapter_digest=rng.choice([None, None, *ADAPTERS]),
        n=rng.choice([1, 1, 1, 2, 3]),
        priority=rng.randrange(3),
        weight=rng.choice([0.5, 1.0, 4.0]),
        max_tokens=rng.randrange(1, 60),
        seed=rng.randrange(100),
        stop_token_ids=rng.choice([(), (), (4,)]),
        num_prompt_logprobs=rng.choice([None, None, None, 0]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_random_arrivals_aborts_preemptions_and_turns(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=rng.randrange(8, 30),
        num_slots=rng.randrange(1, 4),
        max_num_seqs=rng.randrange(1, 9),
        budget=rng.choice([9, 16, 33, 64, 200]),
        max_model_len=8 * BLOCK_SIZE,
        turn_steps=rng.randrange(1, 7),
        num_pages=rng.choice([None, 5, 7]),
        pages=ADAPTERS,
    )
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(0, 110))] for _ in range(4)]
    requests: dict[str, GenerationRequest] = {}
    aborted: set[str] = set()
    for _ in range(120):
        while rng.random() < 0.3:
            request = _random_request(rng, f"r{len(requests)}", prefixes)
            requests[request.id] = request
            bench.add(request)
        if rng.random() < 0.1:
            _random_operation(rng, bench)
        if requests and rng.random() < 0.05 and bench.scheduler.abort(victim := rng.choice(list(requests))):
            aborted.add(victim)
            bench.collect()
        if bench.scheduler.has_work:
            bench.step()
    bench.run()
    assert set(bench.ends) == set(requests)
    for digest in ADAPTERS:
        bench.slots.unpin(digest)
        bench.slots.forget(digest)
    assert bench.slots.num_pages_used == 0
    for request_id, request in requests.items():
        expected = lone_run(request)
        for index in range(request.n):
            tokens = bench.tokens[request_id, index]
            assert tokens == expected[index][: len(tokens) if request_id in aborted else None], (seed, request_id, index)
        assert bench.ends[request_id].end == ("aborted" if request_id in aborted else "finished")
        assert bench.ends[request_id].num_completion_tokens == sum(len(bench.tokens[request_id, index]) for index in range(request.n))
