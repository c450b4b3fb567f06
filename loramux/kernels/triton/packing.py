"""An adapter's weights as pages, packed on the host once, when the adapter is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from loramux.kernels.ops import AdapterWeights, EmbeddingWeights, SiteWeights, SliceWeights
from loramux.kernels.triton.layout import RANKS_PER_PAGE, PageLayout, SitePlace


class Span(NamedTuple):
    """Elements [start, end) of a page."""

    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class PagedWeights(AdapterWeights):
    """An adapter whose matrices lie in pages; the sites that it was packed from are let go."""

    ranks: torch.Tensor
    """int32 [num_modules]"""
    has_vectors: torch.Tensor
    """bool [num_modules]: whether the module has a gain or a shift."""
    spans: tuple[Span, ...]
    """The parts of a page that hold sites of the adapter, in order."""
    pages: torch.Tensor
    """[ceil(rank / 8), sum of the spans' lengths] in the model's dtype; ranks past a module's own are 0."""
    vectors: torch.Tensor | None
    """float32 [num_vector_elements]: the page of vectors of an adapter that has any."""

    @property
    def num_pages(self) -> int:
        return len(self.pages) + int(self.vectors is not None)


class _Module(NamedTuple):
    """A slice that the adapter changes."""

    number: int
    """Among the site's slices."""
    a: torch.Tensor
    """[rank, in_features]"""
    weights: SliceWeights


class _Site(NamedTuple):
    """A site that the adapter changes."""

    place: SitePlace
    modules: tuple[_Module, ...]


def num_pages_of(weights: AdapterWeights) -> int:
    """One for each 8 ranks that any module has begun, and one where there is a gain or a shift."""
    slices = list(_slices(weights))
    return _num_matrix_pages(slices) + int(any(map(_has_vectors, slices)))


def pack(weights: AdapterWeights, layout: PageLayout, *, pinned: bool) -> PagedWeights:
    """Copy weights into pages. Raises ValueError where a slice is not one of the layout's."""
    sites = list(_sites(weights, layout))
    ranks = torch.zeros(layout.num_modules, dtype=torch.int32)
    has_vectors = torch.zeros(layout.num_modules, dtype=torch.bool)
    for place, modules in sites:
        for number, _, each in modules:
            ranks[place.module_start + number] = _rank(each)
            has_vectors[place.module_start + number] = _has_vectors(each)
    return PagedWeights(
        sites=(None,) * len(weights.sites),
        ranks=ranks,
        has_vectors=has_vectors,
        spans=tuple(_spans([site.place for site in sites])),
        pages=_packed_pages(sites, _num_matrix_pages(list(_slices(weights))), layout.dtype, pinned=pinned),
        vectors=_packed_vectors(sites, layout.num_vector_elements, pinned=pinned) if has_vectors.any() else None,
    )


def _slices(weights: AdapterWeights) -> Iterator[SliceWeights]:
    for site in weights.sites:
        if site is not None:
            yield from site.slices
    if weights.embedding is not None:
        yield _embedding_slice(weights.embedding)


def _embedding_slice(weights: EmbeddingWeights) -> SliceWeights:
    rank, hidden = weights.b.shape
    return SliceWeights(0, rank, 0, hidden, weights.b, weights.gain)


def _rank(weights: SliceWeights) -> int:
    return weights.rank_end - weights.rank_start


def _num_matrix_pages(slices: Sequence[SliceWeights]) -> int:
    return -(-max(map(_rank, slices), default=0) // RANKS_PER_PAGE)


def _has_vectors(weights: SliceWeights) -> bool:
    return weights.gain is not None or weights.shift is not None


def _sites(weights: AdapterWeights, layout: PageLayout) -> Iterator[_Site]:
    for place, site in zip(layout.sites[:-1], weights.sites, strict=True):
        if site is not None:
            yield _Site(place, tuple(_modules(site, place)))
    if weights.embedding is not None:
        yield _Site(layout.embedding, (_Module(0, weights.embedding.a.t(), _embedding_slice(weights.embedding)),))


def _modules(site: SiteWeights, place: SitePlace) -> Iterator[_Module]:
    for each in site.slices:
        yield _Module(place.slices.index((each.out_start, each.out_end)), site.a[each.rank_start : each.rank_end], each)


def _packed_pages(sites: Sequence[_Site], num_pages: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    sizes = [site.place.num_elements for site in sites]
    pages = torch.zeros((num_pages, sum(sizes)), dtype=dtype, pin_memory=pinned)
    for page_number, page in enumerate(pages):
        for site, part in zip(sites, page.split(sizes), strict=True):
            _fill(part, site, slice(page_number * RANKS_PER_PAGE, (page_number + 1) * RANKS_PER_PAGE))
    return pages


def _fill(part: torch.Tensor, site: _Site, ranks: slice) -> None:
    """part [num_elements] is the site's of one page, for these ranks."""
    matrices = site.place.matrices(part)
    for number, a, weights in site.modules:
        a, b = a[ranks], weights.b[ranks]
        matrices.a[number, : len(a)] = a
        matrices.b[: len(b), weights.out_start : weights.out_end] = b


def _packed_vectors(sites: Sequence[_Site], num_elements: int, *, pinned: bool) -> torch.Tensor:
    packed = torch.zeros(num_elements, dtype=torch.float32, pin_memory=pinned)
    for place, modules in sites:
        gain, shift = place.vectors(packed)
        gain.fill_(1)
        for _, _, each in modules:
            if each.gain is not None:
                gain[each.out_start : each.out_end] = each.gain
            if each.shift is not None:
                shift[each.out_start : each.out_end] = each.shift
    return packed


def _spans(places: Sequence[SitePlace]) -> list[Span]:
    """The places' parts of a page, neighbours as one."""
    spans: list[Span] = []
    for place in places:
        if spans and spans[-1].end == place.a_start:
            spans[-1] = Span(spans[-1].start, place.end)
        else:
            spans.append(Span(place.a_start, place.end))
    return spans
