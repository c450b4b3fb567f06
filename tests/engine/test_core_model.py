"""The whole engine but its socket, over a real model: whatever the batch, a request's tokens equal its lone run."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema
import pytest

from loramux.adapters.identity import content_digest
from loramux.engine.build import build_core
from loramux.engine.config import EngineConfig
from loramux.engine.core import EngineCore
from loramux.engine.types import GenerationRequest, RequestEnd, TokenLogprob
from loramux.errors import EngineFailed
from loramux.grammar.types import Constraint
from tests.engine.symbolic import make_request
from tests.lora.random_adapters import write_random_adapter

NEAR_TIE = 1e-4
BLOCK_BYTES = 2 * 2 * 32 * 2 * 16 * 4
"""The tiny model's: keys and values, 2 layers, 32 tokens, 2 heads of 16, float32."""

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["bug", "question"]}, "level": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "level"],
    "additionalProperties": False,
}


@dataclass
class Run:
    """What came out of a core for some requests."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[tuple[str, int], list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[tuple[str, int], str] = field(default_factory=lambda: defaultdict(str))
    ends: dict[str, RequestEnd] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)

    def collect(self, core: EngineCore) -> None:
        outputs = core.take_outputs()
        self.admitted += outputs.admitted
        for delta in outputs.deltas:
            key = (delta.request_id, delta.index)
            self.tokens[key] += delta.token_ids
            self.logprobs[key] += delta.logprobs
            self.texts[key] += delta.text
        for end in outputs.ends:
            assert end.request_id not in self.ends
            self.ends[end.request_id] = end

    def finish(self, core: EngineCore, num_requests: int, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.ends) < num_requests:
            assert time.monotonic() < deadline, "a request never ended"
            if core.has_work():
                core.step()
                core.check_integrity()
            else:
                time.sleep(0.002)
            self.collect(core)


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By digest."""
    root = tmp_path_factory.mktemp("adapters")
    directories = [
        write_random_adapter(root / "a", tiny_llama, rank=8, modules=("q_proj", "v_proj"), seed=1),
        write_random_adapter(root / "b", tiny_llama, rank=16, modules=("q_proj", "o_proj", "up_proj", "down_proj"), rslora=True, seed=2),
        write_random_adapter(root / "c", tiny_llama, rank=4, modules=("k_proj", "gate_proj"), layers=(1,), seed=3),
    ]
    return {content_digest(*_contents(directory)): directory for directory in directories}


def _contents(directory: Path) -> tuple[bytes, bytes]:
    return (directory / "adapter_config.json").read_bytes(), (directory / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def core(tiny_llama: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    """9 blocks and 2 slots for 3 adapters: both run short."""
    config = EngineConfig(
        model=str(tiny_llama),
        endpoint="",
        data_dir=str(tmp_path_factory.mktemp("engine")),
        device="cpu",
        dtype="float32",
        kv_cache_gib=9 * BLOCK_BYTES / (1 << 30),
        max_num_seqs=8,
        max_num_batched_tokens=48,
        max_loras=2,
    )

    def fetch(digest: str) -> tuple[bytes, bytes]:
        if digest not in adapters:
            raise EngineFailed(f"no adapter {digest}")
        return _contents(adapters[digest])

    core = build_core(config, fetch, wake=lambda: None)
    yield core
    core.close()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(core: EngineCore) -> Iterator[None]:
    yield
    stats = core.stats()
    assert stats.num_blocks_used == stats.num_slots_used == stats.num_running == stats.num_waiting == stats.num_grammars == 0
    core.check_integrity()


def _random_request(rng: random.Random, request_id: str, digests: list[str], prefixes: list[list[int]]) -> GenerationRequest:
    constrained = rng.random() < 0.25
    return make_request(
        request_id,
        rng.choice(prefixes) + [rng.randrange(3, 384) for _ in range(rng.randrange(1, 30))],
        tenant=rng.choice(["acme", "globex"]),
        adapter_digest=rng.choice([None, *digests]),
        n=rng.choice([1, 1, 2]),
        max_tokens=100 if constrained else rng.randrange(1, 100),
        seed=rng.randrange(1000),
        temperature=rng.choice([0.0, 0.0, 0.8]),
        ignore_eos=not constrained,
        num_logprobs=2,
        constraint=Constraint("json_schema", json.dumps(SCHEMA)) if constrained else None,
    )


def _assert_equal_but_near_ties(mixed: Run, lone: Run, key: tuple[str, int], temperature: float) -> int:
    """The number of near ties met: 0, or 1 where the runs part at one (after it they may differ)."""
    got, expected = mixed.tokens[key], lone.tokens[key]
    for position, (token, other) in enumerate(zip(got, expected, strict=False)):
        if token != other:
            (_, first), (_, second) = lone.logprobs[key][position].top[:2]
            assert temperature == 0 and first - second < NEAR_TIE, f"{key} differs at {position}: {token}, alone {other}"
            return 1
    assert len(got) == len(expected), key
    assert mixed.texts[key] == lone.texts[key], key
    return 0


@pytest.mark.parametrize("seed", range(3))
def test_random_load_equals_lone_runs(core: EngineCore, adapters: dict[str, Path], seed: int) -> None:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, 384) for _ in range(size)] for size in (0, 40, 70)]
    requests = [_random_request(rng, f"{seed}-{index}", sorted(adapters), prefixes) for index in range(30)]
    aborted: set[str] = set()
    mixed, waiting = Run(), list(requests)
    preemptions = core.stats().num_preemptions
    while waiting:
        while waiting and rng.random() < 0.5:
            core.submit(waiting.pop())
        if core.has_work():
            core.step()
            core.check_integrity()
        if rng.random() < 0.05 and len(waiting) < len(requests):
            victim = rng.choice(requests[len(waiting) :]).id
            core.abort(victim)
        mixed.collect(core)
    mixed.finish(core, len(requests))
    aborted = {request_id for request_id, end in mixed.ends.items() if end.end == "aborted"}
    lone = Run()
    for request in requests:
        core.submit(request)
        lone.finish(core, len(lone.ends) + 1)
    near_ties = 0
    for request in requests:
        assert lone.ends[request.id].end == "finished", lone.ends[request.id]
        for index in range(request.n):
            if request.id not in aborted:
                near_ties += _assert_equal_but_near_ties(mixed, lone, (request.id, index), request.sampling.temperature)
                if request.constraint is not None:
                    jsonschema.validate(json.loads(mixed.texts[request.id, index]), SCHEMA)
    preemptions = core.stats().num_preemptions - preemptions
    print(f"seed {seed}: {near_ties} near ties, {len(aborted)} aborted, {preemptions} preemptions")
    assert preemptions > 0, "the load was too light to test preemption"


def test_an_adapter_that_can_not_be_had_fails_its_request_alone(core: EngineCore) -> None:
    run = Run()
    core.submit(make_request("lost", [5, 6], adapter_digest="sha256:" + "0" * 64))
    core.submit(make_request("fine", [5, 6]))
    run.finish(core, 2)
    assert run.ends["lost"].end == "failed" and run.ends["fine"].end == "finished"
    assert run.admitted == ["fine"]


def test_an_unsupported_schema_is_refused_before_admission(core: EngineCore) -> None:
    run = Run()
    core.submit(make_request("r", [5], constraint=Constraint("json_schema", '{"type": "array", "uniqueItems": true}')))
    run.finish(core, 1)
    failure = run.ends["r"].failure
    assert failure is not None and failure.code == "unsupported_schema" and failure.details is not None
    assert failure.details["keywords"][0]["pointer"] == "/uniqueItems"
    assert run.admitted == []


def test_abort_while_the_adapter_loads_unpins_it(core: EngineCore, adapters: dict[str, Path]) -> None:
    run = Run()
    for index in range(20):
        core.submit(make_request(f"r{index}", [5], adapter_digest=sorted(adapters)[index % 3]))
        core.abort(f"r{index}")
    run.finish(core, 20)
    deadline = time.monotonic() + 10
    while core.stats().num_waiting and time.monotonic() < deadline:
        core.step()
    assert {end.end for end in run.ends.values()} == {"aborted"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"salt": b""}, "invalid_request"), ({"prompt_token_ids": ()}, "invalid_request"), ({"prompt_token_ids": (9999,)}, "invalid_request")],
)
def test_requests_that_make_no_sense_are_refused(core: EngineCore, changes: dict[str, object], code: str) -> None:
    request = make_request("r", [5])
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    core.submit(GenerationRequest(**{**fields, **changes}))
    outputs = core.take_outputs()
    assert [end.failure.code for end in outputs.ends if end.failure] == [code]


def test_a_prompt_beyond_the_context_is_refused(core: EngineCore) -> None:
    core.submit(make_request("r", [5] * 510, max_tokens=8))
    (end,) = core.take_outputs().ends
    assert end.failure is not None and end.failure.code == "context_length_exceeded"


def test_a_bad_schema_is_told_before_its_adapter_has_loaded(core: EngineCore, adapters: dict[str, Path]) -> None:
    run = Run()
    digest = sorted(adapters)[0]
    core.submit(
        make_request("r", [5], adapter_digest=digest, constraint=Constraint("json_schema", '{"type": "array", "uniqueItems": true}'))
    )
    run.finish(core, 1)
    failure = run.ends["r"].failure
    assert failure is not None and failure.code == "unsupported_schema"
    deadline = time.monotonic() + 10
    while core.stats().num_waiting and time.monotonic() < deadline:
        core.step()
    run.collect(core)
    assert len(run.ends) == 1
