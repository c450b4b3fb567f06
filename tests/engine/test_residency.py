"""The engine's core over the symbolic model: adapters placed, pinned, dropped and evicted while requests use them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import msgspec
import pytest

from loramux.engine.core import EngineCore
from loramux.engine.protocol import Placed
from loramux.engine.step_budget import StepBudget
from loramux.engine.types import AdapterResidency, GenerationRequest, RequestEnd
from loramux.errors import AdapterLoading
from loramux.grammar.types import CompiledGrammar, Constraint
from loramux.kernels.ops import AdapterWeights
from loramux.lora.host_cache import HostCache
from loramux.lora.slots import SlotTable
from loramux.lora.types import HostAdapter
from tests.engine.scheduler_bench import LetterText
from tests.engine.symbolic import BASE_DIGEST, VOCAB, SymbolicRunner, lone_run, make_request
from tests.fakes import base_description, engine_info


class NoGrammars:
    def compile(self, salt: bytes, constraint: Constraint) -> Future[CompiledGrammar]:
        raise NotImplementedError

    def close(self) -> None:
        pass


class ClosableRunner(SymbolicRunner):
    def close(self) -> None:
        pass


class Loader:
    """`name/bytes/pages` is an adapter of that size; `lost` is nowhere, `broken` breaks the loader."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, digest: str) -> HostAdapter:
        assert self.gate.wait(10)
        self.loads[digest] += 1
        name, num_bytes, num_pages = digest.split("/")
        if name == "lost":
            raise AdapterLoading("no gateway has it")
        if name == "broken":
            raise RuntimeError("the loader is broken")
        return HostAdapter(digest, rank=4, num_bytes=int(num_bytes), num_pages=int(num_pages), weights=AdapterWeights(()))


class Engine:
    """A core of 100 bytes of host memory, 2 slots and 8 pages, and what came out of it."""

    def __init__(self) -> None:
        self.loader = Loader()
        self.cache: HostCache[HostAdapter] = HostCache(100, self.loader)
        self.slots = SlotTable(2, 8)
        base = msgspec.structs.replace(base_description(VOCAB, ()), digest=BASE_DIGEST)
        self.core = EngineCore(
            engine_info(base),
            runner=ClosableRunner(),
            text_factory=lambda _: LetterText(),
            grammars=NoGrammars(),
            adapters=self.cache,
            slots=self.slots,
            slot_turn_steps=4,
            budget=StepBudget(64),
            wake=lambda: None,
        )
        self.placed: dict[str, str | None] = {}
        """Operation id to the failure's code, None for success."""
        self.told: list[AdapterResidency] = []
        self.ends: dict[str, RequestEnd] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}

    def turn(self) -> None:
        """As the engine's loop does it."""
        if self.core.has_work():
            self.core.step()
        outputs = self.core.take_outputs()
        self.core.check_integrity()
        for placed in outputs.placed:
            self._answer(placed)
        for delta in outputs.deltas:
            self.tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        self.ends |= {end.request_id: end for end in outputs.ends}
        self.told += outputs.residency

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not done():
            assert time.monotonic() < deadline
            self.turn()

    def place(self, digest: str, tier: str, pinned: bool | None = None) -> str | None:
        """-> the failure's code"""
        operation_id = f"place{len(self.placed)}"
        self.core.place(operation_id, digest, tier, pinned)  # type: ignore[arg-type]
        self.until(lambda: operation_id in self.placed)
        return self.placed[operation_id]

    def submit(self, request_id: str, digest: str | None, **fields: object) -> GenerationRequest:
        request = make_request(request_id, [1, 2], adapter_digest=digest, **fields)
        self.core.submit(request)
        return request

    def residency(self, digest: str) -> AdapterResidency | None:
        """The last told; None if it is gone, or never was there."""
        return next((each for each in self.core.residency if each.digest == digest), None)

    def _answer(self, placed: Placed) -> None:
        assert placed.operation_id not in self.placed, "answered twice"
        self.placed[placed.operation_id] = placed.failure.code if placed.failure else None


@pytest.fixture
def engine() -> Iterator[Engine]:
    """At the end everything must go back: users, slots, pages, bytes."""
    engine = Engine()
    yield engine
    engine.loader.gate.set()
    engine.until(lambda: not engine.core.has_work() and not engine.core.stats().num_adapters_loading)
    engine.turn()
    for residency in engine.core.residency:
        engine.core.drop(residency.digest)
    engine.turn()
    stats = engine.core.stats()
    assert stats.num_blocks_used == stats.num_slots_used == stats.num_running == stats.num_waiting == 0
    assert (stats.num_host_adapters, stats.host_adapter_bytes, stats.num_adapters_loading, engine.slots.num_pages_used) == (0, 0, 0, 0)
    assert stats.num_adapter_loads == stats.num_adapter_evictions
    assert engine.core.residency == ()
    engine.core.close()


A, B, C = "a/30/2", "b/30/2", "c/30/2"


def test_an_adapter_comes_to_host_memory_and_to_a_slot(engine: Engine) -> None:
    engine.loader.gate.clear()
    engine.core.place("first", A, "host", None)
    engine.turn()
    assert engine.told == [AdapterResidency(A, "none", "loading")] and engine.core.stats().num_adapters_loading == 1
    engine.loader.gate.set()
    engine.until(lambda: "first" in engine.placed)
    assert engine.place(A, "device") is None
    in_host = AdapterResidency(A, "host", num_bytes=30, rank=4)
    assert engine.told[1:] == [in_host, msgspec.structs.replace(in_host, tier="device")]
    assert engine.loader.loads == {A: 1} and engine.slots.num_pages_used == 2
    engine.core.drop(A)
    engine.turn()
    assert engine.told[3:] == [AdapterResidency(A, "none")]
    assert engine.slots.num_pages_used == 0


@pytest.mark.parametrize(
    ("digest", "code"),
    [
        ("lost/1/1", "adapter_loading"),
        ("broken/1/1", "engine_failed"),
        ("large/101/1", "adapter_invalid"),
        ("wide/10/9", "adapter_invalid"),
    ],
)
def test_what_can_not_be_placed_says_why_and_leaves_nothing(engine: Engine, digest: str, code: str) -> None:
    assert engine.place(digest, "device", True) == code
    engine.submit("r", digest)
    engine.submit("fine", A)
    engine.until(lambda: len(engine.ends) == 2)
    failure = engine.ends["r"].failure
    assert failure is not None and failure.code == code
    assert engine.ends["fine"].end == "finished"


def test_first_uses_at_once_load_once(engine: Engine) -> None:
    engine.loader.gate.clear()
    for index in range(10):
        engine.submit(f"r{index}", A)
        engine.core.place(f"p{index}", A, "device", None)
    engine.loader.gate.set()
    engine.until(lambda: len(engine.ends) == len(engine.placed) == 10)
    assert engine.loader.loads == {A: 1} and set(engine.placed.values()) == {None}


def test_a_load_holds_nobody_up(engine: Engine) -> None:
    assert engine.place(B, "device") is None
    engine.loader.gate.clear()
    engine.submit("waits", A)
    requests = [engine.submit("base", None), engine.submit("warm", B)]
    engine.until(lambda: len(engine.ends) == 2)
    assert all(engine.tokens[each.id, 0] == lone_run(each)[0] for each in requests)
    engine.loader.gate.set()
    engine.until(lambda: "waits" in engine.ends)


def test_what_is_dropped_drains_and_is_freed_with_its_last_request(engine: Engine) -> None:
    request = engine.submit("r", A, n=2, max_tokens=30)
    engine.until(lambda: ("r", 1) in engine.tokens)
    engine.core.drop(A)
    engine.turn()
    assert engine.residency(A) == AdapterResidency(A, "device", "draining", num_bytes=30, rank=4)
    engine.until(lambda: "r" in engine.ends)
    engine.turn()
    assert [engine.tokens["r", index] for index in range(2)] == lone_run(request)
    assert engine.residency(A) is None and engine.slots.num_pages_used == 0 and engine.core.stats().host_adapter_bytes == 0


def test_aborting_frees_what_is_dropped_at_once(engine: Engine) -> None:
    engine.submit("r", A, n=3, max_tokens=100)
    engine.until(lambda: ("r", 2) in engine.tokens)
    engine.core.drop(A)
    engine.core.abort("r")
    engine.turn()
    assert engine.residency(A) is None and engine.core.stats().host_adapter_bytes == 0


def test_dropped_before_it_has_loaded(engine: Engine) -> None:
    engine.loader.gate.clear()
    engine.core.place("p", A, "device", True)
    engine.submit("r", A)
    engine.core.drop(A)
    engine.turn()
    assert engine.placed == {"p": "conflict"}
    engine.loader.gate.set()
    engine.until(lambda: "r" in engine.ends)
    engine.turn()
    assert engine.ends["r"].end == "finished" and engine.residency(A) is None


def test_dropped_while_it_waits_for_a_slot(engine: Engine) -> None:
    for name in (A, B):
        engine.submit(name, name, max_tokens=100)
    engine.until(lambda: len(engine.tokens) == 2)
    engine.core.place("p", C, "device", None)
    engine.until(lambda: engine.residency(C) is not None and engine.core.stats().num_adapters_loading == 0)
    assert not engine.placed
    engine.core.drop(C)
    engine.turn()
    assert engine.placed == {"p": "conflict"} and engine.residency(C) is None


def test_placed_again_after_it_was_dropped(engine: Engine) -> None:
    engine.submit("r", A, max_tokens=20)
    engine.until(lambda: engine.tokens)
    engine.core.drop(A)
    assert engine.place(A, "host", True) is None
    engine.until(lambda: "r" in engine.ends)
    engine.turn()
    residency = engine.residency(A)
    assert residency is not None and (residency.state, residency.pinned) == ("ready", True)


def test_old_and_new_weights_live_side_by_side(engine: Engine) -> None:
    """A reload is a new digest: the old one is dropped, and finishes what it began."""
    old = engine.submit("old", "v1/30/2", max_tokens=30)
    engine.until(lambda: engine.tokens)
    engine.core.drop("v1/30/2")
    new = engine.submit("new", "v2/30/2", max_tokens=30)
    engine.until(lambda: len(engine.ends) == 2)
    assert engine.tokens["old", 0] == lone_run(old)[0] != engine.tokens["new", 0] == lone_run(new)[0]
    engine.turn()
    assert engine.residency("v1/30/2") is None and engine.residency("v2/30/2") is not None


def test_pins_keep_an_adapter_on_the_device_against_any_load(engine: Engine) -> None:
    assert engine.place(A, "device", True) is None
    assert engine.place(B, "device", True) == "conflict"
    residency = engine.residency(B)
    assert residency is not None and not residency.pinned
    for index in range(12):
        engine.submit(f"r{index}", f"x{index}/30/2", max_tokens=3)
    engine.until(lambda: len(engine.ends) == 12)
    assert engine.residency(A) == AdapterResidency(A, "device", pinned=True, num_bytes=30, rank=4)
    assert engine.loader.loads[A] == 1
    assert engine.place(A, "device", None) is None
    assert engine.slots.is_pinned(A)
    assert engine.place(A, "device", False) is None
    for index in range(4):
        engine.submit(f"y{index}", f"y{index}/30/2", max_tokens=3)
    engine.until(lambda: len(engine.ends) == 16)
    engine.turn()
    assert engine.residency(A) is None


def test_a_pin_in_host_memory_leaves_the_slot(engine: Engine) -> None:
    assert engine.place(A, "device", True) is None
    assert engine.place(A, "host", True) is None
    assert not engine.slots.is_pinned(A)
    residency = engine.residency(A)
    assert residency is not None and residency.pinned


def test_pins_leave_room_in_host_memory(engine: Engine) -> None:
    assert engine.place("large/60/1", "host") is None
    assert engine.place(A, "host", True) is None
    assert engine.place(B, "device", True) == "conflict"
    assert not engine.slots.is_pinned(B)
    assert engine.place("large/60/1", "host") is None


def test_what_leaves_host_memory_leaves_its_slot(engine: Engine) -> None:
    assert engine.place(A, "device") is None
    for name in ("x/40/1", "y/40/1"):
        assert engine.place(name, "host") is None
    assert engine.residency(A) is None and engine.slots.num_pages_used == 0
    assert engine.core.stats().num_adapter_evictions == 1


def test_a_device_without_room_beside_the_pins(engine: Engine) -> None:
    assert engine.place("a/1/4", "device", True) is None
    assert engine.place("b/1/5", "device") == "adapter_loading"
    engine.submit("r", "b/1/5")
    engine.until(lambda: "r" in engine.ends)
    failure = engine.ends["r"].failure
    assert failure is not None and failure.code == "adapter_loading"
    assert engine.place("a/1/4", "host", False) is None
    assert engine.place("b/1/5", "device") is None
