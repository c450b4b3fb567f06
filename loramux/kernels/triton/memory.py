"""The adapters' memory on the device: one pool of pages, and a table that says which pages, ranks and vectors each slot has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from loramux.errors import StartupFailed
from loramux.kernels.ops import LoraLimits
from loramux.kernels.triton.layout import RANKS_PER_PAGE, PageLayout
from loramux.kernels.triton.packing import PagedWeights

_NO_VECTORS = -1


class _Held(NamedTuple):
    """What a page or a slot has. The weights may be freed while the device still has a copy."""

    weights: Callable[[], PagedWeights | None]
    """A weak reference."""
    pages: tuple[int, ...]

    def is_of(self, weights: PagedWeights, pages: tuple[int, ...]) -> bool:
        return self.weights() is weights and self.pages == pages


_NOTHING = _Held(lambda: None, ())


class SlotMemory:
    """Everything of it has the same address and shape for ever, so that a captured launch sees what was moved in later.

    Copies are queued on the stream that computes: a step finds what was moved in before it, and no copy overtakes a step that still
    reads a page's last owner. Raises `StartupFailed` where the memory holds no adapter of the largest rank.
    """

    def __init__(self, layout: PageLayout, limits: LoraLimits, device: torch.device) -> None:
        self.layout = layout
        self.max_matrix_pages = -(-limits.max_rank // RANKS_PER_PAGE)
        self.num_pages = _num_pages(layout, limits, self.max_matrix_pages + 1)
        self.pages = torch.empty((self.num_pages, layout.page_elements), dtype=layout.dtype, device=device)
        """In the model's dtype."""
        self.vectors = self.pages.view(torch.float32)
        """The same memory, for pages of vectors."""
        self.table = torch.zeros((limits.num_slots, self.max_matrix_pages + 2 * layout.num_modules), dtype=torch.int32, device=device)
        """By slot: pages of matrices, in order of rank; rank of each module; for each module the page of vectors, or -1."""
        self._held_by_page = [_NOTHING] * self.num_pages
        self._held_by_slot = [_NOTHING] * limits.num_slots

    @property
    def rank_column(self) -> int:
        """Column of the table where the modules' ranks begin."""
        return self.max_matrix_pages

    @property
    def vector_column(self) -> int:
        """Column of the table where the modules' pages of vectors begin."""
        return self.max_matrix_pages + self.layout.num_modules

    @property
    def copies_from_pinned(self) -> bool:
        """Whether what is moved in must lie in pinned host memory, so that nobody waits for the copy."""
        return self.pages.is_cuda

    def put(self, slot: int, pages: tuple[int, ...], weights: PagedWeights) -> None:
        """Make the slot's what it is to be, unless it is already. Raises ValueError where the pages are not as many as needed."""
        if len(pages) != weights.num_pages or len(weights.pages) > self.max_matrix_pages:
            raise ValueError(f"slot {slot} has {len(pages)} pages, its adapter takes {weights.num_pages}")
        held = _Held(weakref.ref(weights), pages)
        if not all(self._held_by_page[page].is_of(weights, pages) for page in pages):
            self._move(pages, weights)
            for page in pages:
                self._held_by_page[page] = held
        if not self._held_by_slot[slot].is_of(weights, pages):
            self._enter(slot, pages, weights)
            self._held_by_slot[slot] = held

    def _move(self, pages: Sequence[int], weights: PagedWeights) -> None:
        starts = [0]
        for span in weights.spans:
            starts.append(starts[-1] + span.end - span.start)
        for page, packed in zip(pages, weights.pages, strict=False):
            for span, (start, end) in zip(weights.spans, pairwise(starts), strict=True):
                self.pages[page, span.start : span.end].copy_(packed[start:end], non_blocking=True)
        if weights.vectors is not None:
            self.vectors[pages[-1], : len(weights.vectors)].copy_(weights.vectors, non_blocking=True)

    def _enter(self, slot: int, pages: Sequence[int], weights: PagedWeights) -> None:
        row = torch.zeros(self.table.shape[1], dtype=torch.int32, pin_memory=self.copies_from_pinned)
        row[: len(weights.pages)] = torch.tensor(pages[: len(weights.pages)], dtype=torch.int32)
        row[self.rank_column : self.vector_column] = weights.ranks
        row[self.vector_column :] = torch.where(weights.has_vectors, pages[-1] if pages else _NO_VECTORS, _NO_VECTORS)
        self.table[slot].copy_(row, non_blocking=True)


def _num_pages(layout: PageLayout, limits: LoraLimits, most_pages: int) -> int:
    if limits.memory_bytes is None:
        return limits.num_slots * most_pages
    num_pages = limits.memory_bytes // layout.page_bytes
    if limits.num_slots and num_pages < most_pages:
        least = most_pages * layout.page_bytes / 2**30
        raise StartupFailed(f"an adapter of rank {limits.max_rank} takes up to {least:.3f} GiB; raise --lora-memory-gib to that or more")
    return num_pages
