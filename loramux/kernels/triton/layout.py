"""Where everything lies in a page of the adapters' memory: 8 ranks of every module of one model, so that memory follows the rank.

A module is one slice of a site; the embedding is the last site, with one slice. A page of matrices holds, site after site, A and B:

    A [num_slices, 8, in_features]    B [8, width]        of a linear layer
    A [vocab, 8]                      B [8, hidden]       of the embedding

Page g of an adapter has ranks 8 g to 8 g + 7 of each of its modules; what the adapter lacks is never read. Where an adapter has gains
or shifts one more page holds, site after site, two float32 vectors: gain [width], shift [width].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from loramux.kernels.ops import LoraShape, SiteShape

RANKS_PER_PAGE = 8
_ALIGNMENT = 64
"""Elements: 128 bytes or more, a line of the GPU's cache; and the 16 by which Triton tells that wide loads are allowed."""


class Matrices(NamedTuple):
    a: torch.Tensor
    """[num_slices, 8, in_features]"""
    b: torch.Tensor
    """[8, width]"""


class SitePlace(NamedTuple):
    """A site's part of every page."""

    in_features: int
    slices: tuple[tuple[int, int], ...]
    """(out_start, out_end) of each."""
    module_start: int
    """Number of the first slice among the model's modules."""
    a_start: int
    """Element of the page; B follows A."""
    b_start: int
    end: int
    vector_start: int
    """Element of a page of vectors."""
    is_embedding: bool

    @property
    def num_elements(self) -> int:
        return self.end - self.a_start

    @property
    def width(self) -> int:
        """Columns of the output."""
        return max(end for _, end in self.slices)

    def matrices(self, part: torch.Tensor) -> Matrices:
        """Views of A and B in this site's part [num_elements] of a page."""
        num_ranks = len(self.slices) * RANKS_PER_PAGE
        a = part[: num_ranks * self.in_features]
        a = a.view(self.in_features, num_ranks).t() if self.is_embedding else a.view(num_ranks, self.in_features)
        b = part[self.b_start - self.a_start :][: RANKS_PER_PAGE * self.width].view(RANKS_PER_PAGE, self.width)
        return Matrices(a.view(len(self.slices), RANKS_PER_PAGE, self.in_features), b)

    def vectors(self, page: torch.Tensor) -> torch.Tensor:
        """View of gain and shift [2, width] in a page of vectors."""
        return page[self.vector_start :][: 2 * self.width].view(2, self.width)


@dataclass(frozen=True)
class PageLayout:
    """The same for every page. Made by `page_layout`."""

    sites: tuple[SitePlace, ...]
    """By the site's number; the embedding is the last."""
    dtype: torch.dtype

    @property
    def embedding(self) -> SitePlace:
        return self.sites[-1]

    @property
    def num_modules(self) -> int:
        return self.embedding.module_start + 1

    @property
    def num_vector_elements(self) -> int:
        return self.embedding.vector_start + 2 * self.embedding.width

    @cached_property
    def page_elements(self) -> int:
        """Of the model's dtype; a page of vectors is never the larger one."""
        vectors = -(-self.num_vector_elements * torch.float32.itemsize // self.dtype.itemsize)
        return max(self.embedding.end, _aligned(vectors))

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.dtype.itemsize


def page_layout(shape: LoraShape) -> PageLayout:
    embedding = SiteShape(shape.vocab_size, ((0, shape.hidden_size),))
    places = list(_places((*shape.sites, embedding)))
    return PageLayout((*places[:-1], places[-1]._replace(is_embedding=True)), shape.dtype)


def _places(sites: tuple[SiteShape, ...]) -> Iterator[SitePlace]:
    start = module_start = vector_start = 0
    for in_features, slices in sites:
        b_start = start + _aligned(len(slices) * RANKS_PER_PAGE * in_features)
        width = max(end for _, end in slices)
        end = b_start + _aligned(RANKS_PER_PAGE * width)
        yield SitePlace(in_features, slices, module_start, start, b_start, end, vector_start, is_embedding=False)
        start, module_start, vector_start = end, module_start + len(slices), vector_start + _aligned(2 * width)


def _aligned(num_elements: int) -> int:
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT
