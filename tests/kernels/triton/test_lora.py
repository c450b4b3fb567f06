"""Shrink, expand and embed, interpreted, against the equation in float64."""

from __future__ import annotations

import pytest
import torch

from loramux.kernels.ops import AdapterWeights, LoraLimits, LoraShape, LoraSlots, SiteShape, SiteWeights, SliceWeights, SlotRows
from loramux.kernels.triton.lora import MAX_SPLITS, SPLIT_ROWS, TritonLoraPlan, TritonLoraSlots, splits_of
from loramux.kernels.triton.ops import TritonOps
from tests.kernels.lora_cases import POPULARITIES, SITES, TOLERANCE, Draw, LoraCase, expected_at_site, expected_embeddings, plan

INTERPRETED_TOLERANCE = TOLERANCE | {torch.bfloat16: (8e-3, 1e-4)}
"""The interpreter cuts float32 off to bfloat16, where a GPU rounds it: a whole unit in the last place."""

LIMITS = LoraLimits(num_slots=260, max_rank=128, max_num_tokens=300)
SMALL_RANKS = (1, 2, 7, 8, 9, 16, 31, 64)
LONG = LoraShape((SiteShape(1111, ((0, 130), (130, 150))),), 7, 5, torch.float32)
"""A sum that is split in 5, and a slice wider than a program's columns."""


def make_slots(shape: LoraShape, limits: LoraLimits = LIMITS) -> TritonLoraSlots:
    """Memory that holds NaN, of which nothing may be read before it is written."""
    slots = TritonOps("cpu").lora_slots(shape, limits)
    assert isinstance(slots, TritonLoraSlots)
    slots._buffers.memory.pages.fill_(float("nan"))
    slots._buffers.shrunk.fill_(float("nan"))
    return slots


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    rtol, atol = INTERPRETED_TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def check(case: LoraCase, draw: Draw, slots: LoraSlots | None = None) -> None:
    made = plan(slots or make_slots(case.shape), case)
    for site, shape in enumerate(case.shape.sites):
        x, y = draw.matrix(case.num_rows, shape.in_features), draw.matrix(case.num_rows, shape.slices[-1][1])
        want = expected_at_site(case, site, y, x)
        made.apply(site, y, x)
        assert_close(y, want)
    y, token_ids = draw.matrix(case.num_rows, case.shape.hidden_size), draw.tokens(case.num_rows)
    want = expected_embeddings(case, y, token_ids)
    made.embed(y, token_ids)
    assert_close(y, want)


@pytest.mark.parametrize(
    ("num_rows", "popularity", "dtype"),
    [
        (1, "identical", torch.bfloat16),
        (7, "distinct", torch.float32),
        (11, "uniform", torch.float16),
        (13, "uniform", torch.bfloat16),
        (23, "zipf", torch.float32),
    ],
)
def test_updates_are_the_equation(num_rows: int, popularity: str, dtype: torch.dtype) -> None:
    draw = Draw(num_rows, dtype)
    check(draw.case(num_rows, popularity, SMALL_RANKS), draw)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 17, 64, 131, 257])
def test_updates_are_the_equation_at_every_size(num_rows: int, popularity: str, dtype: torch.dtype) -> None:
    draw = Draw(num_rows, dtype)
    check(draw.case(num_rows, popularity), draw)


def test_one_pool_serves_batch_after_batch() -> None:
    """Each batch's adapters take the slots and pages of the batch before; what that left in them must not be seen."""
    draw = Draw(11, torch.float32)
    slots = make_slots(draw.case(3, "identical").shape)
    for ranks in ((64, 31), (3, 1), (9,)):
        check(draw.case(13, "uniform", ranks), draw, slots)


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_rows_of_nobody_keep_every_bit(popularity: str) -> None:
    draw = Draw(3, torch.float32)
    case = draw.case(13, popularity, SMALL_RANKS)
    mine = {row for start, end, _ in case.segments for row in range(start, end)}
    others = [row for row in range(13) if row not in mine]
    made = plan(make_slots(case.shape), case)
    for site, shape in enumerate(SITES):
        x = draw.matrix(13, shape.in_features)
        x[others] = float("nan")
        y = draw.matrix(13, shape.slices[-1][1])
        y[others, ::2] = -0.0
        before = y.clone()
        made.apply(site, y, x)
        assert torch.equal(y[others].view(torch.int32), before[others].view(torch.int32))
        assert y.isfinite().all()


def one_slice_adapter(draw: Draw, rank: int) -> AdapterWeights:
    part = SliceWeights(0, rank, 130, 150, draw.matrix(rank, 20))
    return AdapterWeights((SiteWeights(draw.matrix(rank, 1111, 0.03), (part,)),))


def test_a_slice_without_ranks_keeps_every_bit() -> None:
    draw = Draw(4, torch.float32)
    case = LoraCase(LONG, (one_slice_adapter(draw, 5),), 6, ((1, 6, 0),))
    y, x = torch.full((6, 150), -0.0), draw.matrix(6, 1111)
    want = expected_at_site(case, 0, y, x)
    plan(make_slots(LONG), case).apply(0, y, x)
    assert_close(y, want)
    assert torch.signbit(y[:, :130]).all()


def test_a_split_sum_gives_the_same_bits_again_and_in_any_company() -> None:
    draw = Draw(5, torch.float32)
    assert splits_of(9, 1111).num_splits == 5
    adapters = tuple(one_slice_adapter(draw, rank) for rank in (5, 17, 8))
    y, x = draw.matrix(9, 150), draw.matrix(9, 1111)
    together = [y.clone() for _ in range(2)]
    case = LoraCase(LONG, adapters, 9, ((0, 2, 0), (2, 6, 1), (7, 9, 2)))
    for each in together:
        plan(make_slots(LONG), case).apply(0, each, x)
    assert torch.equal(*together)
    alone = y.clone()
    plan(make_slots(LONG), LoraCase(LONG, adapters[1:2], 9, ((2, 6, 0),))).apply(0, alone, x)
    assert torch.equal(alone[2:6], together[0][2:6])


@pytest.mark.parametrize("in_features", [1, 127, 128, 129, 576, 1111, 4096, 14336])
@pytest.mark.parametrize("num_rows", [1, 16, 1000, 3000, 9000])
def test_splits_cover_the_sum_in_whole_blocks_within_the_scratch(num_rows: int, in_features: int) -> None:
    num_splits, num_elements = splits_of(num_rows, in_features)
    assert (num_splits - 1) * num_elements < in_features <= num_splits * num_elements
    assert num_elements % 128 == 0
    assert num_splits <= MAX_SPLITS
    assert num_splits * num_rows <= max(SPLIT_ROWS, num_rows)


def slot_rows(slots: LoraSlots, segments: list[tuple[int, int, int]], adapters: list[AdapterWeights]) -> list[SlotRows]:
    """Of (start, end, slot); slot i has the adapter and the pages i."""
    return [SlotRows(start, end, slot, (slot,), slots.prepare(adapters[slot])) for start, end, slot in segments]


def test_a_plan_is_refilled_in_place() -> None:
    """As a captured graph needs it: the same tensors and launches, another batch in the same rows."""
    draw = Draw(6, torch.float32)
    slots, adapters = make_slots(LONG), [one_slice_adapter(draw, rank) for rank in (5, 8, 3)]
    made = slots.plan(slot_rows(slots, [(0, 3, 0), (4, 9, 2)], adapters))
    assert isinstance(made, TritonLoraPlan)
    tensors = (made._blocks.table, slots._buffers.memory.table, slots._buffers.memory.pages)
    addresses = [tensor.data_ptr() for tensor in tensors]
    num_blocks = made._blocks.num_blocks(9)
    for segments in ([(2, 9, 1)], [], [(0, 1, 0), (1, 8, 2)]):
        y, x = draw.matrix(9, 150), draw.matrix(9, 1111)
        want = expected_at_site(LoraCase(LONG, tuple(adapters), 9, tuple(segments)), 0, y, x)
        made.refill(slot_rows(slots, segments, adapters))
        made.apply(0, y, x)
        assert_close(y, want)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert made._blocks.num_blocks(9) == num_blocks


@pytest.mark.parametrize(
    ("y", "x", "message"),
    [
        (torch.zeros(9, 149), torch.zeros(9, 1111), "y must be"),
        (torch.zeros(8, 150), torch.zeros(9, 1111), "y must be"),
        (torch.zeros(9, 150, dtype=torch.float16), torch.zeros(9, 1111), "y must be"),
        (torch.zeros(150, 9).t(), torch.zeros(9, 1111), "y must be"),
        (torch.zeros(9, 150), torch.zeros(9, 1110), "x must be"),
        (torch.zeros(9, 150), torch.zeros(9, 1111, dtype=torch.float64), "x must be"),
        (torch.zeros(8, 150), torch.zeros(8, 1111), "8 rows for a plan of 9"),
        (torch.zeros(301, 150), torch.zeros(301, 1111), "of at most 300"),
    ],
)
def test_a_batch_of_other_sizes_is_refused(y: torch.Tensor, x: torch.Tensor, message: str) -> None:
    draw = Draw(7, torch.float32)
    made = plan(make_slots(LONG), LoraCase(LONG, (one_slice_adapter(draw, 5),), 9, ((2, 9, 0),)))
    with pytest.raises(ValueError, match=message):
        made.apply(0, y, x)
    assert y.count_nonzero() == 0


def test_embeddings_of_other_sizes_are_refused() -> None:
    made = make_slots(LONG).plan([])
    with pytest.raises(ValueError, match="y must be"):
        made.embed(torch.zeros(3, 6), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="y must be"):
        made.embed(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))
