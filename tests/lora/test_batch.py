from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.kernels.ops import SliceWeights
from loramux.kernels.reference.lora import lora
from loramux.lora.batch import lora_terms
from loramux.lora.types import HostAdapter, LoraSegment, SiteWeights

IN, OUT = 6, 10


def adapter(digest: str, rank: int, sites: tuple[str, ...]) -> HostAdapter:
    generator = torch.Generator().manual_seed(sum(digest.encode()))
    weights = {
        site: SiteWeights(
            torch.randn(2 * rank, IN, generator=generator),
            (
                SliceWeights(0, rank, 0, 4, torch.randn(4, rank, generator=generator)),
                SliceWeights(rank, 2 * rank, 7, 10, torch.randn(3, rank, generator=generator)),
            ),
        )
        for site in sites
    }
    return HostAdapter(digest, rank, 0, weights)


ADAPTERS = [adapter("a", 2, ("qkv", "down")), adapter("b", 5, ("qkv",)), adapter("c", 1, ("down",))]


def delta(weights: SiteWeights, x: torch.Tensor) -> torch.Tensor:
    """What the adapter adds, from the full matrix B A."""
    full = torch.zeros(OUT, IN)
    for part in weights.slices:
        full[part.out_start : part.out_end] = part.b @ weights.a[part.rank_start : part.rank_end]
    return x @ full.T


def test_no_segments_no_terms() -> None:
    assert lora_terms([]) == {}


def test_sites_that_nobody_changes_are_absent() -> None:
    terms = lora_terms([LoraSegment(2, 5, ADAPTERS[1])])
    assert set(terms) == {"qkv"}
    assert [(term.start, term.end) for term in terms["qkv"]] == [(2, 5)]


def test_neighbours_of_one_adapter_are_one_term() -> None:
    a, b, _ = ADAPTERS
    terms = lora_terms([LoraSegment(0, 1, a), LoraSegment(1, 4, a), LoraSegment(4, 5, b), LoraSegment(6, 7, a), LoraSegment(8, 9, a)])
    assert [(term.start, term.end) for term in terms["qkv"]] == [(0, 4), (4, 5), (6, 7), (8, 9)]
    assert [(term.start, term.end) for term in terms["down"]] == [(0, 4), (6, 7), (8, 9)]


@pytest.mark.parametrize("rows", [[(0, 0)], [(3, 1)], [(-1, 2)], [(0, 3), (2, 4)], [(4, 6), (0, 2)]])
def test_segments_that_overlap_are_refused(rows: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError):
        lora_terms([LoraSegment(start, end, ADAPTERS[i % 2]) for i, (start, end) in enumerate(rows)])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-1, len(ADAPTERS) - 1)), min_size=1, max_size=12), st.sampled_from(["qkv", "down"])
)
def test_every_row_gets_its_own_adapter_and_no_other(runs: list[tuple[int, int]], site: str) -> None:
    """Random batches of runs of rows; -1 is the base, whose rows stay bit for bit what they were."""
    segments, owners = [], []
    for length, index in runs:
        if index >= 0:
            segments.append(LoraSegment(len(owners), len(owners) + length, ADAPTERS[index]))
        owners += [index] * length
    generator = torch.Generator().manual_seed(0)
    x, before = torch.randn(len(owners), IN, generator=generator), torch.randn(len(owners), OUT, generator=generator)
    y = before.clone()
    lora(y, x, lora_terms(segments).get(site, ()))
    for row, index in enumerate(owners):
        weights = ADAPTERS[index].sites.get(site) if index >= 0 else None
        if weights is None:
            assert torch.equal(y[row], before[row])
        else:
            torch.testing.assert_close(y[row], before[row] + delta(weights, x[row]), rtol=1e-5, atol=1e-5)
