"""What the native updates promise beyond their equation, which `kernels/test_lora.py` holds them to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.kernels.ops import AdapterWeights, LoraLimits, LoraShape, SlotRows
from loramux.kernels.reference.lora import ReferenceLoraSlots
from tests.kernels.lora_cases import HIDDEN_SIZE, SITES, VOCAB_SIZE, Draw, LoraCase, assert_as_expected, expected_at_site, plan

_native = pytest.importorskip("loramux.kernels.cpu._native", reason="the native kernels are not built", exc_type=ImportError)

from loramux.kernels.cpu.lora import CpuLoraSlots  # noqa: E402
from loramux.kernels.cpu.ops import CpuOps  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
SHAPE = LoraShape(SITES, VOCAB_SIZE, HIDDEN_SIZE, torch.float32)
LIMITS = LoraLimits(num_slots=300, max_rank=128, max_num_tokens=300)


@pytest.fixture(params=_native.supported_isas(), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def whole_adapter(draw: Draw) -> AdapterWeights:
    return AdapterWeights(tuple(draw.site(shape) for shape in SITES), draw.embedding())


def results(slots: CpuLoraSlots, case: LoraCase, draw: Draw) -> list[torch.Tensor]:
    """y of every site and of the embedding; the same inputs for the same draw."""
    made = plan(slots, case)
    changed: list[torch.Tensor] = []
    for site, shape in enumerate(SITES):
        changed.append(draw.matrix(case.num_rows, shape.slices[-1][1]))
        made.apply(site, changed[-1], draw.matrix(case.num_rows, shape.in_features))
    changed.append(draw.matrix(case.num_rows, HIDDEN_SIZE))
    made.embed(changed[-1], draw.tokens(case.num_rows))
    return changed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", ["identical", "uniform"])
def test_results_do_not_depend_on_the_number_of_threads(isa: Any, popularity: str, dtype: torch.dtype, set_num_threads: Any) -> None:
    case = Draw(7, dtype).case(131, popularity)
    slots = CpuLoraSlots(case.shape, isa)
    found: list[list[torch.Tensor]] = []
    for num_threads in (1, 2, 3, 7):
        set_num_threads(num_threads)
        found.append(results(slots, case, Draw(8, dtype)))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [2, 3, 7, 17, 31])
def test_a_row_does_not_depend_on_its_companions(isa: Any, num_rows: int, dtype: torch.dtype) -> None:
    draw = Draw(num_rows, dtype)
    slots = CpuLoraSlots(replace(SHAPE, dtype=dtype), isa)
    weights = slots.prepare(whole_adapter(draw))
    for site, shape in enumerate(SITES):
        x, y = draw.matrix(num_rows, shape.in_features), draw.matrix(num_rows, shape.slices[-1][1])
        alone = y.clone()
        slots.plan([SlotRows(0, num_rows, 0, (), weights)]).apply(site, y, x)
        for row in range(num_rows):
            slots.plan([SlotRows(0, 1, 0, (), weights)]).apply(site, alone[row : row + 1], x[row : row + 1])
        assert torch.equal(y, alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_segment_does_not_depend_on_the_others(isa: Any, dtype: torch.dtype) -> None:
    draw = Draw(1, dtype)
    slots = CpuLoraSlots(replace(SHAPE, dtype=dtype), isa)
    long, other = slots.prepare(whole_adapter(draw)), slots.prepare(whole_adapter(draw))
    for site, shape in enumerate(SITES):
        x, y = draw.matrix(110, shape.in_features), draw.matrix(110, shape.slices[-1][1])
        alone = y[5:75].clone()
        slots.plan([SlotRows(1, 5, 0, (), other), SlotRows(5, 75, 1, (), long), SlotRows(75, 110, 0, (), other)]).apply(site, y, x)
        slots.plan([SlotRows(0, 70, 1, (), long)]).apply(site, alone, x[5:75])
        assert torch.equal(y[5:75], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [129, 320])
def test_ranks_beyond_what_is_widened_at_once(isa: Any, rank: int, dtype: torch.dtype) -> None:
    draw = Draw(rank, dtype)
    case = LoraCase(replace(SHAPE, dtype=dtype), (AdapterWeights((None, None, draw.site(SITES[2], (rank,)), None)),), 19, ((1, 18, 0),))
    x, y = draw.matrix(19, 97), draw.matrix(19, 131)
    want = expected_at_site(case, 2, y, x)
    plan(CpuLoraSlots(case.shape, isa), case).apply(2, y, x)
    assert_as_expected(y, want)


def test_float16_runs_on_the_reference() -> None:
    assert isinstance(CpuOps().lora_slots(replace(SHAPE, dtype=torch.float16), LIMITS), ReferenceLoraSlots)
    assert isinstance(CpuOps().lora_slots(SHAPE, LIMITS), CpuLoraSlots)


@pytest.mark.parametrize("rows", [[(0, 0)], [(3, 2)], [(-1, 2)], [(0, 3), (2, 4)], [(2, 4), (0, 1)]], ids=str)
def test_rows_that_are_empty_or_overlap_are_refused(rows: list[tuple[int, int]]) -> None:
    slots = CpuOps().lora_slots(SHAPE, LIMITS)
    weights = slots.prepare(whole_adapter(Draw(1, torch.float32)))
    with pytest.raises(ValueError, match="empty, or overlap"):
        slots.plan([SlotRows(start, end, 0, (), weights) for start, end in rows])


def test_weights_that_were_not_prepared_are_refused() -> None:
    with pytest.raises(ValueError, match="prepare"):
        CpuOps().lora_slots(SHAPE, LIMITS).plan([SlotRows(0, 1, 0, (), whole_adapter(Draw(1, torch.float32)))])


@pytest.mark.parametrize(
    ("y", "x"),
    [
        (torch.zeros(5, 61, dtype=torch.bfloat16), torch.ones(5, 37)),
        (torch.zeros(5, 61), torch.ones(5, 37, dtype=torch.float64)),
        (torch.zeros(61, 5).t(), torch.ones(5, 37)),
        (torch.zeros(5, 61), torch.ones(5, 74)[:, ::2]),
        (torch.zeros(5, 60), torch.ones(5, 37)),
        (torch.zeros(5, 61), torch.ones(5, 38)),
        (torch.zeros(6, 61), torch.ones(5, 37)),
        (torch.zeros(4, 61), torch.ones(4, 37)),
        (torch.zeros(5 * 61), torch.ones(5, 37)),
        (torch.zeros(5, 61), torch.ones(5, 37, device="meta")),
    ],
    ids=str,
)
def test_matrices_that_do_not_fit_are_refused_before_anything_is_written(y: torch.Tensor, x: torch.Tensor) -> None:
    slots = CpuOps().lora_slots(SHAPE, LIMITS)
    with pytest.raises(ValueError, match=r"fit|unpack|contiguous"):
        slots.plan([SlotRows(2, 5, 0, (), slots.prepare(whole_adapter(Draw(1, torch.float32))))]).apply(1, y, x)
    assert y.count_nonzero() == 0


@pytest.mark.parametrize("tokens", [[0, VOCAB_SIZE, 0], [0, 0, -1], [0, 0], [0, 0, 0, 0], [[0, 0, 0]], [0.0, 0.0, 0.0]], ids=str)
def test_tokens_that_do_not_fit_are_refused_before_anything_is_written(tokens: list[Any]) -> None:
    slots = CpuOps().lora_slots(SHAPE, LIMITS)
    weights = slots.prepare(whole_adapter(Draw(1, torch.float32)))
    y = torch.zeros(3, HIDDEN_SIZE)
    with pytest.raises(ValueError, match=r"vocabulary|shape|contiguous"):
        slots.plan([SlotRows(0, 1, 0, (), weights), SlotRows(1, 3, 1, (), weights)]).embed(y, torch.tensor(tokens))
    assert y.count_nonzero() == 0


def test_a_token_of_nobody_may_be_any() -> None:
    slots = CpuOps().lora_slots(SHAPE, LIMITS)
    made = slots.plan([SlotRows(1, 2, 0, (), slots.prepare(whole_adapter(Draw(1, torch.float32))))])
    y = torch.zeros(3, HIDDEN_SIZE)
    made.embed(y, torch.tensor([-7, 0, 10**9]))
    assert y[[0, 2]].count_nonzero() == 0 and y[1].count_nonzero() > 0


def _damaged(weights: AdapterWeights, **changes: Any) -> AdapterWeights:
    """The first slice of the first site changed, or its A, or the embedding's A."""
    site, embedding = weights.sites[0], weights.embedding
    assert site is not None and embedding is not None
    if "embedding_a" in changes:
        return replace(weights, embedding=replace(embedding, a=changes["embedding_a"]))
    if "a" in changes:
        return replace(weights, sites=(replace(site, a=changes["a"]), *weights.sites[1:]))
    return replace(weights, sites=(replace(site, slices=(site.slices[0]._replace(**changes), *site.slices[1:])), *weights.sites[1:]))


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_start": -1},
        {"rank_end": 1000},
        {"out_end": 95},
        {"out_start": 96, "out_end": 128},
        {"b": torch.zeros(8, 96, dtype=torch.bfloat16)},
        {"b": torch.zeros(96, 8).t()},
        {"b": torch.zeros(9, 96)},
        {"b": torch.zeros(8, 96, device="meta")},
        {"gain": torch.zeros(95)},
        {"gain": torch.zeros(96, dtype=torch.float64)},
        {"shift": torch.zeros(192)[::2]},
        {"a": torch.zeros(24, 65)},
        {"a": torch.zeros(24, 64, dtype=torch.float16)},
        {"embedding_a": torch.zeros(VOCAB_SIZE - 1, 8)},
        {"embedding_a": torch.zeros(VOCAB_SIZE, 8, dtype=torch.bfloat16)},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_an_adapter_of_another_layout_is_not_prepared(changes: dict[str, Any]) -> None:
    draw = Draw(1, torch.float32)
    site = replace(draw.site(SITES[0], (8,)), slices=())
    while [part.rank_end - part.rank_start for part in site.slices] != [8, 8, 8]:
        site = draw.site(SITES[0], (8,))
    good = AdapterWeights((site, None, None, None), draw.embedding((8,)))
    slots = CpuOps().lora_slots(SHAPE, LIMITS)
    slots.prepare(good)
    with pytest.raises(ValueError, match=r"ranks|slices|shape|contiguous"):
        slots.prepare(_damaged(good, **changes))


def test_an_adapter_of_another_model_is_not_prepared() -> None:
    with pytest.raises(ValueError, match="3 sites for a model of 4"):
        CpuOps().lora_slots(SHAPE, LIMITS).prepare(AdapterWeights((None,) * 3))


def test_a_site_that_the_model_has_not_is_refused() -> None:
    slots = CpuOps().lora_slots(SHAPE, LIMITS)
    made = slots.plan([SlotRows(0, 1, 0, (), slots.prepare(AdapterWeights((None,) * 4)))])
    with pytest.raises(ValueError, match="no site 4"):
        made.apply(4, torch.zeros(1, 61), torch.zeros(1, 37))


def test_adapters_are_prepared_in_several_threads() -> None:
    slots = CpuOps().lora_slots(SHAPE, LIMITS)
    adapters = [whole_adapter(Draw(seed, torch.float32)) for seed in range(16)]
    with ThreadPoolExecutor(4) as pool:
        prepared = list(pool.map(slots.prepare, adapters))
    for mine, weights in zip(adapters, prepared, strict=True):
        y, x = torch.zeros(3, 61), torch.ones(3, 37)
        want = expected_at_site(LoraCase(SHAPE, (mine,), 3, ((0, 3, 0),)), 1, y, x)
        slots.plan([SlotRows(0, 3, 0, (), weights)]).apply(1, y, x)
        assert_as_expected(y, want)


def test_a_plan_keeps_what_it_points_into() -> None:
    slots = CpuOps().lora_slots(SHAPE, LIMITS)
    y, x = torch.zeros(3, 61), torch.ones(3, 37)
    want = expected_at_site(LoraCase(SHAPE, (whole_adapter(Draw(1, torch.float32)),), 3, ((0, 3, 0),)), 1, y, x)
    made = slots.plan([SlotRows(0, 3, 0, (), slots.prepare(whole_adapter(Draw(1, torch.float32))))])
    litter = [torch.full((size,), float("nan")) for size in range(1, 30000, 97)]
    made.apply(1, y, x)
    assert_as_expected(y, want)
    assert len(litter) > 0


def test_a_call_releases_the_interpreter_lock() -> None:
    """Another thread's clock ticks while one long call runs: with the lock held it could not tick at all."""
    draw = Draw(1, torch.float32)
    case = LoraCase(SHAPE, (AdapterWeights((draw.site(SITES[0], (128,)), None, None, None)),), 200000, ((0, 200000, 0),))
    made = plan(CpuOps().lora_slots(SHAPE, LIMITS), case)
    x, y = draw.matrix(200000, 64), torch.zeros(200000, 160)
    span: list[float] = []

    def call() -> None:
        start = time.perf_counter()
        made.apply(0, y, x)
        span.extend((start, time.perf_counter()))

    ticks: list[float] = []
    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.0005)
    thread.join()
    start, end = span
    assert any(start + 0.001 < tick < end - 0.001 for tick in ticks), f"{len(ticks)} ticks, a call of {end - start:.4f} s"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the process does not list what it has mapped")
def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    """Two pools of threads on the same cores would stall each other."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    assert len([path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]) == 1
