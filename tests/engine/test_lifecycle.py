"""Adapters registered, placed, pinned, used, aborted, dropped and reloaded at random, over a real model whose pools are too small for
them: every output is that of a lone run of exactly the version the request was admitted with, and at the end every count is zero."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from loramux.adapters.identity import content_digest
from loramux.engine.build import GIB, build_core
from loramux.engine.config import EngineConfig
from loramux.engine.core import EngineCore
from loramux.engine.types import GenerationRequest, RequestEnd, TokenLogprob
from loramux.errors import AdapterLoading
from loramux.grammar.types import Constraint
from tests.engine.symbolic import make_request
from tests.engine.test_core_model import BLOCK_BYTES, NEAR_TIE
from tests.lora.random_adapters import ALL_LINEAR, write_random_adapter

NUM_VERSIONS = 10
MAX_TOKENS = 14
CHOICES = 3
SCHEMA = json.dumps({"enum": ["bug", "question", "praise"]})
PROMPTS = tuple(tuple(random.Random(size).randrange(3, 384) for _ in range(size)) for size in (2, 33, 70))


@dataclass(frozen=True)
class Task:
    """What decides a request's tokens, but for how many of them are asked for."""

    digest: str | None
    prompt: int
    temperature: float
    constrained: bool

    def request(self, request_id: str, *, n: int, max_tokens: int, tenant: str = "acme", priority: int = 0) -> GenerationRequest:
        return make_request(
            request_id,
            PROMPTS[self.prompt],
            tenant=tenant,
            priority=priority,
            adapter_digest=self.digest,
            n=n,
            max_tokens=max_tokens,
            seed=7,
            temperature=self.temperature,
            ignore_eos=not self.constrained,
            num_logprobs=2,
            constraint=Constraint("json_schema", SCHEMA) if self.constrained else None,
        )


@dataclass
class Output:
    """Of one request, by choice."""

    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: defaultdict[int, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    end: RequestEnd | None = None


class World:
    """A core, the versions that names stand for now, and what is in flight."""

    def __init__(self, core: EngineCore, contents: dict[str, tuple[bytes, bytes]], crashing: set[str], rng: random.Random) -> None:
        self.core = core
        self.crashing = crashing
        self._unnamed = list(contents)
        self._rng = rng
        self.named: dict[str, str] = {}
        self.requests: dict[str, tuple[Task, GenerationRequest]] = {}
        self.outputs: dict[str, Output] = {}
        self.open: list[str] = []
        self.num_placements = 0
        self.codes: Counter[str] = Counter()
        """Of placements that failed."""
        self.answered: set[str] = set()

    def operate(self) -> None:
        operations: list[tuple[Callable[[], None], int]] = [
            (self.register, 2),
            (self.place, 3),
            (self.unregister, 1),
            (self.run, 9),
            (self.abort, 2),
            (self.crash, 1),
        ]
        operation = self._rng.choices([each for each, _ in operations], [weight for _, weight in operations])[0]
        operation()

    def register(self) -> None:
        """New content under a name. What the name stood for before is dropped, like on a reload with changed weights."""
        name = f"adapter{self._rng.randrange(6)}"
        digest = self._unnamed.pop(self._rng.randrange(len(self._unnamed)))
        old = self.named.get(name)
        self.named[name] = digest
        if old is not None:
            self._unnamed.append(old)
            self.core.drop(old)

    def unregister(self) -> None:
        if len(self.named) > 2:
            digest = self.named.pop(self._rng.choice(sorted(self.named)))
            self._unnamed.append(digest)
            self.core.drop(digest)

    def place(self) -> None:
        if digest := self._digest():
            self.num_placements += 1
            tier = self._rng.choice(["host", "device"])
            self.core.place(f"p{self.num_placements}", digest, tier, self._rng.choice([None, None, True, False]))  # type: ignore[arg-type]

    def run(self) -> None:
        digest = self._digest() if self._rng.random() < 0.85 else None
        constrained = self._rng.random() < 0.05
        task = Task(digest, self._rng.randrange(len(PROMPTS)), 0.0 if constrained else self._rng.choice([0.0, 0.9]), constrained)
        request = task.request(
            f"r{len(self.requests)}",
            n=self._rng.choice([1, 1, 1, 2, CHOICES]),
            max_tokens=self._rng.randrange(1, MAX_TOKENS + 1),
            tenant=self._rng.choice(["acme", "acme", "globex"]),
            priority=self._rng.randrange(2),
        )
        self.requests[request.id] = (task, request)
        self.outputs[request.id] = Output()
        self.open.append(request.id)
        self.core.submit(request)

    def abort(self) -> None:
        if self.open:
            self.core.abort(self._rng.choice(self.open))

    def crash(self) -> None:
        """The next load of some adapter breaks."""
        if digest := self._digest():
            self.crashing.add(digest)

    def turn(self) -> None:
        if self.core.has_work():
            self.core.step()
            self.core.check_integrity()
        outputs = self.core.take_outputs()
        for delta in outputs.deltas:
            output = self.outputs[delta.request_id]
            assert output.end is None
            output.tokens[delta.index] += delta.token_ids
            output.logprobs[delta.index] += delta.logprobs
        for end in outputs.ends:
            assert self.outputs[end.request_id].end is None, "two terminal records"
            self.outputs[end.request_id].end = end
            self.open.remove(end.request_id)
        for placed in outputs.placed:
            assert placed.operation_id not in self.answered
            self.answered.add(placed.operation_id)
            if placed.failure:
                self.codes[placed.failure.code] += 1

    def settle(self, timeout_s: float = 60.0) -> None:
        """Until nothing is in flight: requests that were refused early may still wait for a load."""
        deadline = time.monotonic() + timeout_s
        while self.open or len(self.answered) < self.num_placements or self.core.stats().num_waiting:
            assert time.monotonic() < deadline, f"{self.open} never ended, {len(self.answered)} of {self.num_placements} answered"
            if not self.core.has_work():
                time.sleep(0.001)
            self.turn()

    def _digest(self) -> str | None:
        return self.named[self._rng.choice(sorted(self.named))] if self.named else None


@dataclass
class Lab:
    core: EngineCore
    contents: dict[str, tuple[bytes, bytes]]
    crashing: set[str]
    lone_runs: dict[Task, Output] = field(default_factory=dict)

    def lone_run(self, task: Task) -> Output:
        """All choices, as many tokens as any request asks for: noise depends on seed, choice and position alone, so a request for less
        gets the beginning."""
        if task not in self.lone_runs:
            world = World(self.core, self.contents, self.crashing, random.Random(0))
            world.outputs["lone"] = Output()
            world.open.append("lone")
            self.core.submit(task.request("lone", n=CHOICES, max_tokens=MAX_TOKENS))
            world.settle()
            output = world.outputs["lone"]
            assert output.end is not None and output.end.end == "finished", output.end
            self.lone_runs[task] = output
        return self.lone_runs[task]


@pytest.fixture(scope="module")
def lab(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """9 blocks, 2 slots, and host memory for some 3 of the adapters. One thread: the model is too small to be worth two."""
    root = tmp_path_factory.mktemp("versions")
    contents: dict[str, tuple[bytes, bytes]] = {}
    for seed in range(NUM_VERSIONS):
        modules = ALL_LINEAR if seed % 2 else ("q_proj", "v_proj", "down_proj")
        directory = write_random_adapter(root / str(seed), tiny_llama, rank=(4, 8, 16)[seed % 3], modules=modules, seed=seed)
        files = (directory / "adapter_config.json").read_bytes(), (directory / "adapter_model.safetensors").read_bytes()
        contents[content_digest(*files)] = files
    crashing: set[str] = set()

    def fetch(digest: str) -> tuple[bytes, bytes]:
        if digest in crashing:
            crashing.discard(digest)
            raise (AdapterLoading("no gateway has it") if int(digest[-1], 16) % 2 else RuntimeError("the load crashed"))
        return contents[digest]

    config = EngineConfig(
        model=str(tiny_llama),
        endpoint="",
        data_dir=str(tmp_path_factory.mktemp("engine")),
        device="cpu",
        dtype="float32",
        kv_cache_gib=9 * BLOCK_BYTES / GIB,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        max_loras=2,
        num_threads=1,
        lora_host_gib=3.5 * max(len(tensors) for _, tensors in contents.values()) / GIB,
    )
    num_threads = torch.get_num_threads()
    core = build_core(config, fetch, wake=lambda: None)
    yield Lab(core, contents, crashing)
    core.close()
    torch.set_num_threads(num_threads)


def test_the_versions_are_far_apart(lab: Lab) -> None:
    outputs = [lab.lone_run(Task(digest, 1, 0.0, False)).tokens[0] for digest in (None, *lab.contents)]
    assert len({tuple(tokens[:8]) for tokens in outputs}) == 1 + NUM_VERSIONS


@pytest.mark.parametrize(("num_operations", "seed"), [(2_000, 1), pytest.param(20_000, 2, marks=pytest.mark.slow)])
def test_random_lifecycles(lab: Lab, num_operations: int, seed: int) -> None:
    rng = random.Random(seed)
    before = lab.core.stats()
    world = World(lab.core, lab.contents, lab.crashing, rng)
    for _ in range(3):
        world.register()
    for _ in range(num_operations):
        world.operate()
        while len(world.open) > 10 or rng.random() < 0.5:
            world.turn()
    world.settle()
    _assert_nothing_is_left(lab, world)
    after = lab.core.stats()
    lab.crashing.clear()
    counts = _compare(lab, world)
    print(f"seed {seed}: {num_operations} operations, {dict(counts)}, placements failed {dict(world.codes)}")
    moves = ("num_preemptions", "num_slot_turns", "num_adapter_evictions")
    print({name: getattr(after, name) - getattr(before, name) for name in moves})
    assert all(getattr(after, name) - getattr(before, name) > num_operations / 100 for name in moves), "the load was too light"
    assert counts["near ties"] <= max(3, counts["equal"] / 200)
    assert counts["finished"] > 5 * counts["failed"]


def _assert_nothing_is_left(lab: Lab, world: World) -> None:
    for digest in lab.contents:
        lab.core.drop(digest)
    world.turn()
    lab.core.check_integrity()
    stats = lab.core.stats()
    assert stats.num_blocks_used == stats.num_slots_used == stats.num_running == stats.num_waiting == stats.num_grammars == 0
    assert (stats.num_host_adapters, stats.host_adapter_bytes, stats.num_adapters_loading) == (0, 0, 0)
    assert stats.num_adapter_loads == stats.num_adapter_evictions
    assert lab.core.residency == ()


def _compare(lab: Lab, world: World) -> Counter[str]:
    """Every request against its lone run. -> how they ended, and how many choices are equal or part at a near tie"""
    counts: Counter[str] = Counter()
    for request_id, (task, request) in world.requests.items():
        output = world.outputs[request_id]
        assert output.end is not None
        counts[output.end.end] += 1
        if output.end.end == "failed":
            assert output.end.failure is not None and output.end.failure.code in ("adapter_loading", "engine_failed"), output.end
            assert not output.tokens
        for index, tokens in output.tokens.items():
            lone = lab.lone_run(task)
            expected = lone.tokens[index][: request.sampling.max_tokens]
            if output.end.end == "finished":
                assert len(tokens) == len(expected) or tokens != expected[: len(tokens)], (request_id, task, index)
            counts["near ties" if _parts_at_near_tie(tokens, expected, lone.logprobs[index], (request_id, task, index)) else "equal"] += 1
    return counts


def _parts_at_near_tie(tokens: list[int], expected: list[int], logprobs: list[TokenLogprob], where: object) -> bool:
    for position, (token, other) in enumerate(zip(tokens, expected, strict=False)):
        if token != other:
            (_, first), (_, second) = logprobs[position].top[:2]
            assert first - second < NEAR_TIE, f"{where} differs at {position}: {token}, alone {other}"
            return True
    return False
