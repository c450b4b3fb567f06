from __future__ import annotations

import pytest
import torch

from loramux.kernels.ops import AdapterWeights, EmbeddingWeights, LoraShape, SiteShape, SiteWeights, SliceWeights
from loramux.kernels.triton.layout import page_layout
from loramux.kernels.triton.packing import PagedWeights, num_pages_of, pack

SHAPE = LoraShape((SiteShape(6, ((0, 4), (4, 7))), SiteShape(5, ((0, 3),)), SiteShape(7, ((0, 2),))), 9, 6, torch.float32)
LAYOUT = page_layout(SHAPE)


def site(in_features: int, *slices: tuple[int, int, int], gain: bool = False, shift: bool = False) -> SiteWeights:
    """Slices are (rank, out_start, out_end); every number differs, and none is 0."""
    parts, rank_start = [], 0
    for rank, start, end in slices:
        b = torch.arange(1.0, rank * (end - start) + 1).view(rank, end - start)
        vectors = [torch.arange(2.0, end - start + 2) if has else None for has in (gain, shift)]
        parts.append(SliceWeights(rank_start, rank_start + rank, start, end, b, *vectors))
        rank_start += rank
    return SiteWeights(torch.arange(1.0, rank_start * in_features + 1).view(rank_start, in_features), tuple(parts))


def embedding(rank: int, gain: torch.Tensor | None = None) -> EmbeddingWeights:
    return EmbeddingWeights(torch.arange(1.0, 9 * rank + 1).view(9, rank), torch.arange(1.0, 6 * rank + 1).view(rank, 6), gain)


def packed(weights: AdapterWeights) -> PagedWeights:
    return pack(weights, LAYOUT, pinned=False)


def whole_page(weights: PagedWeights, number: int) -> torch.Tensor:
    """As it will lie on the device; NaN where nothing is moved."""
    page = torch.full((LAYOUT.page_elements,), float("nan"))
    start = 0
    for span in weights.spans:
        page[span.start : span.end] = weights.pages[number, start : start + span.end - span.start]
        start += span.end - span.start
    assert start == weights.pages.shape[1]
    return page


@pytest.mark.parametrize(("rank", "num_pages"), [(1, 1), (8, 1), (9, 2), (64, 8), (127, 16), (128, 16)])
def test_pages_follow_the_largest_rank(rank: int, num_pages: int) -> None:
    weights = AdapterWeights((site(6, (rank, 0, 4), (3, 4, 7)), None, None))
    assert num_pages_of(weights) == packed(weights).num_pages == num_pages


def test_a_page_more_holds_gains_and_shifts() -> None:
    plain, gained = site(6, (8, 0, 4)), site(6, (8, 0, 4), gain=True)
    assert num_pages_of(AdapterWeights((plain, None, None))) == 1
    assert num_pages_of(AdapterWeights((gained, None, None))) == packed(AdapterWeights((gained, None, None))).num_pages == 2
    assert num_pages_of(AdapterWeights((None, None, None), embedding(8, gain=torch.ones(6)))) == 2
    assert num_pages_of(AdapterWeights((site(6, (0, 0, 4), shift=True), None, None))) == 1


def test_ranks_lie_in_their_pages_and_the_rest_is_zero() -> None:
    weights = site(6, (11, 0, 4), (2, 4, 7))
    paged = packed(AdapterWeights((weights, None, None)))
    place = LAYOUT.sites[0]
    first, second = (place.matrices(whole_page(paged, number)[place.a_start : place.end]) for number in range(2))
    assert torch.equal(torch.cat((first.a[0], second.a[0, :3])), weights.a[:11])
    assert torch.equal(torch.cat((first.b[:, :4], second.b[:3, :4])), weights.slices[0].b)
    assert torch.equal(first.a[1, :2], weights.a[11:])
    assert torch.equal(first.b[:2, 4:], weights.slices[1].b)
    for absent in (second.a[0, 3:], second.b[3:], first.a[1, 2:], first.b[2:, 4:], second.a[1], second.b[:, 4:]):
        assert absent.count_nonzero() == 0
    assert paged.ranks.tolist() == [11, 2, 0, 0, 0]


def test_the_embedding_is_packed_by_token() -> None:
    weights = embedding(10)
    paged = packed(AdapterWeights((None, None, None), weights))
    place = LAYOUT.embedding
    parts = [place.matrices(whole_page(paged, number)[place.a_start : place.end]) for number in range(2)]
    assert torch.equal(torch.cat([a[0] for a, _ in parts])[:10].t(), weights.a)
    assert torch.equal(torch.cat([b for _, b in parts])[:10], weights.b)
    assert paged.ranks.tolist() == [0, 0, 0, 0, 10]


def test_only_what_the_adapter_has_is_packed_and_neighbours_are_one_span() -> None:
    first, second, third = LAYOUT.sites[:3]
    both = packed(AdapterWeights((site(6, (8, 0, 4)), site(5, (8, 0, 3)), None)))
    assert both.spans == ((first.a_start, second.end),)
    apart = packed(AdapterWeights((site(6, (8, 0, 4)), None, site(7, (8, 0, 2)))))
    assert apart.spans == ((first.a_start, first.end), (third.a_start, third.end))
    assert apart.pages.shape == (1, first.num_elements + third.num_elements)


def test_an_absent_gain_is_1_and_an_absent_shift_0() -> None:
    gained = site(6, (1, 0, 4), gain=True)
    shifted = site(5, (1, 0, 3), shift=True)
    paged = packed(AdapterWeights((gained, shifted, site(7, (1, 0, 2)))))
    assert paged.vectors is not None
    assert LAYOUT.sites[0].vectors(paged.vectors).tolist() == [[2, 3, 4, 5, 1, 1, 1], [0] * 7]
    assert LAYOUT.sites[1].vectors(paged.vectors).tolist() == [[1, 1, 1], [2, 3, 4]]
    assert paged.has_vectors.tolist() == [True, False, True, False, False]


def test_packed_weights_let_go_of_what_they_were_made_of() -> None:
    paged = packed(AdapterWeights((site(6, (8, 0, 4)), None, None), embedding(3)))
    assert paged.sites == (None, None, None)
    assert paged.embedding is None


def test_a_slice_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="tuple"):
        packed(AdapterWeights((site(6, (8, 0, 5)), None, None)))
    with pytest.raises(ValueError, match="argument"):
        packed(AdapterWeights((site(6, (8, 0, 4)),)))
