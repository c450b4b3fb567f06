"""Every implementation of low-rank updates against the equation in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from loramux.kernels.ops import (
    AdapterWeights,
    LoraLimits,
    LoraPlan,
    LoraShape,
    LoraSlots,
    Ops,
    SiteShape,
    SiteWeights,
    SliceWeights,
    SlotRows,
)
from loramux.kernels.reference.ops import ReferenceOps
from tests.kernels.lora_cases import (
    POPULARITIES,
    RANKS,
    SITES,
    Draw,
    LoraCase,
    assert_as_expected,
    expected_at_site,
    expected_embeddings,
    plan,
)


def _implementations() -> dict[str, Callable[[], Ops]]:
    try:
        from loramux.kernels.cpu import _native
        from loramux.kernels.cpu.ops import CpuOps
    except ImportError:
        return {"reference": ReferenceOps}
    return {"reference": ReferenceOps} | {isa.name.lower(): functools.partial(CpuOps, isa) for isa in _native.supported_isas()}


IMPLEMENTATIONS = _implementations()
"""On the CPU."""
LIMITS = LoraLimits(num_slots=300, max_rank=128, max_num_tokens=300)
DTYPES = [torch.float32, torch.bfloat16]
FEW_ROWS = [1, 2, 3, 7, 17, 64, 257]
MANY_ROWS = [*range(1, 65), 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 128, 129, 191, 193, 223, 251, 256, 257]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share a busy machine wait for each other, at every call."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_slots(name: str, shape: LoraShape) -> LoraSlots:
    return IMPLEMENTATIONS[name]().lora_slots(shape, LIMITS)


def check(name: str, case: LoraCase, draw: Draw) -> None:
    made = plan(make_slots(name, case.shape), case)
    for site, shape in enumerate(case.shape.sites):
        x, y = draw.matrix(case.num_rows, shape.in_features), draw.matrix(case.num_rows, shape.slices[-1][1])
        want, before = expected_at_site(case, site, y, x), y.clone()
        made.apply(site, y, x)
        assert_as_expected(y, want)
        assert_rest_unchanged(y, before, case, site)
    y, token_ids = draw.matrix(case.num_rows, case.shape.hidden_size), draw.tokens(case.num_rows)
    want = expected_embeddings(case, y, token_ids)
    made.embed(y, token_ids)
    assert_as_expected(y, want)


def assert_rest_unchanged(y: torch.Tensor, before: torch.Tensor, case: LoraCase, site: int) -> None:
    """Bit for bit: rows of nobody, and columns that their adapter has no slice for."""
    rest = torch.ones_like(y, dtype=torch.bool)
    for start, end, adapter in case.segments:
        weights = case.adapters[adapter].sites[site]
        for part in weights.slices if weights else ():
            rest[start:end, part.out_start : part.out_end] = False
    assert torch.equal(y[rest], before[rest])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_rows", FEW_ROWS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_updates_are_the_equation(name: str, num_rows: int, popularity: str, dtype: torch.dtype) -> None:
    draw = Draw(num_rows, dtype)
    check(name, draw.case(num_rows, popularity), draw)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_updates_are_the_equation_for_every_number_of_rows(name: str, popularity: str, dtype: torch.dtype) -> None:
    for num_rows in MANY_ROWS:
        draw = Draw(1000 + num_rows, dtype)
        check(name, draw.case(num_rows, popularity), draw)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", range(1, 129))
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_updates_are_the_equation_for_every_rank(name: str, rank: int, dtype: torch.dtype) -> None:
    draw = Draw(rank, dtype)
    check(name, draw.case(13, "uniform", (rank,)), draw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_rank_at_once(name: str, dtype: torch.dtype) -> None:
    draw = Draw(5, dtype)
    case = draw.case(64, "distinct")
    ranks = {part.rank_end - part.rank_start for each in case.adapters for site in each.sites if site for part in site.slices}
    assert ranks == {0, *RANKS}
    check(name, case, draw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_y_is_rounded_once_to_nearest_even(name: str, dtype: torch.dtype) -> None:
    """A slice that only shifts zeros leaves the shift itself, rounded: any float32, among them halves of a unit in the last place."""
    bits = torch.randint(-(2**31), 2**31, (7, 96), generator=torch.Generator().manual_seed(1), dtype=torch.int64).to(torch.int32)
    bits[1:4] = (bits[1:4] & ~0xFFFF) | 0x8000
    bits[4] = torch.tensor([0x7F800000, -0x800000, 0x7F7FFFFF, 0x7FC00001, 0x7F800001, -1, 1, 0x80000000 - 2**32] * 12)
    for shift in bits.view(torch.float32):
        y = torch.zeros(1, 96, dtype=dtype)
        _shift_only(name, shift, dtype).apply(0, y, torch.zeros(1, 4, dtype=dtype))
        torch.testing.assert_close(y[0], (shift + 0.0).to(dtype), rtol=0, atol=0, equal_nan=True)


def _shift_only(name: str, shift: torch.Tensor, dtype: torch.dtype) -> LoraPlan:
    width = len(shift)
    slots = make_slots(name, LoraShape((SiteShape(4, ((0, width),)),), 2, 4, dtype))
    part = SliceWeights(0, 0, 0, width, torch.empty(0, width, dtype=dtype), None, shift)
    weights = AdapterWeights((SiteWeights(torch.empty(0, 4, dtype=dtype), (part,)),))
    return slots.plan([SlotRows(0, 1, 0, (), slots.prepare(weights))])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    draw = Draw(3, torch.float32)
    case = LoraCase(draw.case(1, "identical").shape, (AdapterWeights((None, draw.site(SITES[1]), None, None)),), 7, ((0, 7, 0),))
    x, y = draw.matrix(7, 37), draw.matrix(7, 61)
    want = expected_at_site(case, 1, y, x)
    x[4, 36] = float("nan")
    plan(make_slots(name, case.shape), case).apply(1, y, x)
    assert bool(y[4].isnan().all())
    others = [0, 1, 2, 3, 5, 6]
    assert_as_expected(y[others], want[others])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_batch_of_nobody_changes_nothing(name: str) -> None:
    draw = Draw(2, torch.float32)
    case = LoraCase(draw.case(1, "identical").shape, (), 5, ())
    x, y = draw.matrix(5, 64), draw.matrix(5, 160)
    before = y.clone()
    made = plan(make_slots(name, case.shape), case)
    made.apply(0, y, x)
    embeddings = draw.matrix(5, 64)
    before_embeddings = embeddings.clone()
    made.embed(embeddings, draw.tokens(5))
    assert torch.equal(y, before) and torch.equal(embeddings, before_embeddings)
