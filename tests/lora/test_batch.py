from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.kernels.ops import AdapterWeights, LoraLimits, LoraShape, SiteShape, SiteWeights, SliceWeights
from loramux.kernels.reference.ops import ReferenceOps
from loramux.lora.batch import picked_rows, slot_rows
from loramux.lora.types import HostAdapter, LoraSegment

IN, OUT = 6, 10
LIMITS = LoraLimits(num_slots=4, max_rank=8, max_num_tokens=64)
SLOTS = ReferenceOps().lora_slots(LoraShape((SiteShape(IN, ((0, 4), (4, 7), (7, 10))),) * 2, 12, IN, torch.float32), LIMITS)


def site(generator: torch.Generator, rank: int) -> SiteWeights:
    return SiteWeights(
        torch.randn(2 * rank, IN, generator=generator),
        (
            SliceWeights(0, rank, 0, 4, torch.randn(rank, 4, generator=generator)),
            SliceWeights(rank, 2 * rank, 7, 10, torch.randn(rank, 3, generator=generator)),
        ),
    )


def adapter(digest: str, rank: int, sites: tuple[int, ...]) -> HostAdapter:
    generator = torch.Generator().manual_seed(sum(digest.encode()))
    weights = AdapterWeights(tuple(site(generator, rank) if index in sites else None for index in range(2)))
    return HostAdapter(digest, rank, 0, 0, weights)


ADAPTERS = [adapter("a", 2, (0, 1)), adapter("b", 5, (0,)), adapter("c", 1, (1,))]


def segment(start: int, end: int, slot: int) -> LoraSegment:
    return LoraSegment(start, end, slot, (), ADAPTERS[slot])


def changed(weights: SiteWeights | None, x: torch.Tensor) -> torch.Tensor:
    """What the adapter adds, from the full matrix B A."""
    full = torch.zeros(OUT, IN)
    for part in weights.slices if weights else ():
        full[part.out_start : part.out_end] = part.b.T @ weights.a[part.rank_start : part.rank_end] if weights else 0
    return x @ full.T


def test_neighbours_in_one_slot_are_one() -> None:
    rows = slot_rows([segment(0, 1, 0), segment(1, 4, 0), segment(4, 5, 1), segment(6, 7, 0), segment(8, 9, 0)])
    assert [(each.start, each.end, each.slot) for each in rows] == [(0, 4, 0), (4, 5, 1), (6, 7, 0), (8, 9, 0)]
    assert [each.weights for each in rows] == [ADAPTERS[slot].weights for slot in (0, 1, 0, 0)]


@pytest.mark.parametrize("rows", [[(0, 0)], [(3, 1)], [(-1, 2)], [(0, 3), (2, 4)], [(4, 6), (0, 2)]])
def test_segments_that_overlap_are_refused(rows: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="rows"):
        slot_rows([segment(start, end, index % 2) for index, (start, end) in enumerate(rows)])


OWNERS = st.lists(st.integers(-1, len(ADAPTERS) - 1), min_size=1, max_size=20)
"""Whose each row is; -1 is the base."""


def segments_of(owners: list[int]) -> list[LoraSegment]:
    return [segment(row, row + 1, owner) for row, owner in enumerate(owners) if owner >= 0]


@settings(deadline=None)
@given(OWNERS, st.integers(0, 1))
def test_every_row_is_changed_by_its_own_adapter_alone(owners: list[int], index: int) -> None:
    generator = torch.Generator().manual_seed(len(owners))
    x, y = torch.randn(len(owners), IN, generator=generator), torch.randn(len(owners), OUT, generator=generator)
    got = y.clone()
    SLOTS.plan(slot_rows(segments_of(owners))).apply(index, got, x)
    for row, owner in enumerate(owners):
        added = changed(ADAPTERS[owner].weights.sites[index], x[row]) if owner >= 0 else torch.zeros(OUT)
        torch.testing.assert_close(got[row], y[row] + added)


@settings(deadline=None)
@given(OWNERS, st.data())
def test_picked_rows_keep_their_owners(owners: list[int], data: st.DataObject) -> None:
    picked = sorted(data.draw(st.sets(st.integers(0, len(owners) - 1))))
    rows = picked_rows(slot_rows(segments_of(owners)), picked)
    found = [-1] * len(picked)
    for each in rows:
        assert each.start < each.end
        for row in range(each.start, each.end):
            assert found[row] == -1
            found[row] = each.slot
    assert found == [owners[row] for row in picked]
