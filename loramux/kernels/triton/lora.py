"""y' = gain * y + (x A^T)[:, ranks] B + shift on CUDA: shrink and expand, one launch of each for all slices of a layer and all slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from loramux.kernels.ops import AdapterWeights, LoraLimits, LoraShape, SlotRows
from loramux.kernels.triton.embed import embed
from loramux.kernels.triton.expand import column_blocks, expand
from loramux.kernels.triton.layout import page_layout
from loramux.kernels.triton.memory import SlotMemory
from loramux.kernels.triton.packing import PagedWeights, num_pages_of, pack
from loramux.kernels.triton.rows import RowBlocks, block_rows_of
from loramux.kernels.triton.shrink import BLOCK_INNER, shrink

MAX_SPLITS = 8
"""Parts of a sum over in_features; `expand` reads the float32 sums of each."""

SPLIT_ROWS = 8192
"""Rows times splits: from here on there are programs enough."""


class Splits(NamedTuple):
    """How a sum over in_features is split."""

    num_splits: int
    num_elements: int
    """In each but the last."""


def splits_of(num_rows: int, in_features: int) -> Splits:
    """As many as keep the device busy, each of whole blocks, none empty."""
    num_blocks = -(-in_features // BLOCK_INNER)
    most = min(MAX_SPLITS, num_blocks, max(1, SPLIT_ROWS // num_rows))
    num_elements = -(-num_blocks // most) * BLOCK_INNER
    return Splits(-(-in_features // num_elements), num_elements)


@dataclass(frozen=True, eq=False)
class LoraBuffers:
    """What all plans share, since they run one after another. Allocated once."""

    memory: SlotMemory
    shrunk: torch.Tensor
    """float32, for the largest site and batch."""
    columns: dict[tuple[tuple[int, int], ...], torch.Tensor]
    """The slices of a site to its `column_blocks`, int32 [num_column_blocks, 3]."""
    limits: LoraLimits


class TritonLoraSlots:
    """Implements `kernels.ops.LoraSlots`."""

    def __init__(self, shape: LoraShape, limits: LoraLimits, device: torch.device) -> None:
        layout = page_layout(shape)
        num_slices = max(len(site.slices) for site in layout.sites)
        num_rows = min(MAX_SPLITS * limits.max_num_tokens, max(SPLIT_ROWS, limits.max_num_tokens))
        self._buffers = LoraBuffers(
            memory=SlotMemory(layout, limits, device),
            shrunk=torch.empty(num_rows * num_slices * limits.max_rank, dtype=torch.float32, device=device),
            columns={site.slices: torch.tensor(column_blocks(site), dtype=torch.int32, device=device) for site in layout.sites},
            limits=limits,
        )
        self.num_pages: int | None = self._buffers.memory.num_pages

    def prepare(self, weights: AdapterWeights) -> PagedWeights:
        memory = self._buffers.memory
        return pack(weights, memory.layout, pinned=memory.copies_from_pinned)

    def num_pages_of(self, weights: AdapterWeights) -> int:
        return num_pages_of(weights)

    def plan(self, rows: Sequence[SlotRows]) -> TritonLoraPlan:
        """Raises ValueError where rows, slots or pages are not what `SlotRows` says, or over the limits."""
        plan = TritonLoraPlan(self._buffers, block_rows_of(rows[-1].end if rows else 0))
        plan.take(rows)
        return plan


class TritonLoraPlan:
    """Implements `kernels.ops.LoraPlan`. Its launches depend on the number of rows alone: once captured in a CUDA graph they serve every
    batch that the plan is refilled with.
    """

    def __init__(self, buffers: LoraBuffers, block_rows: int, table: torch.Tensor | None = None) -> None:
        """With a `table` int32 [N, 3] on the device, the caller fills it with another plan's `numbers` of as many rows."""
        self.buffers = buffers
        self._blocks = RowBlocks(buffers.limits, block_rows, buffers.shrunk.device, table)
        self._rows: tuple[SlotRows, ...] = ()
        self._num_rows = 0
        self._is_filled = table is not None

    def take(self, rows: Sequence[SlotRows]) -> None:
        """Take over a batch, and move what its slots do not hold yet to the device. Its rows follow when they are first asked for."""
        self._blocks.check(rows)
        self._rows = tuple(rows)
        self._num_rows = rows[-1].end if rows else 0
        self._is_filled = False
        for each in rows:
            assert isinstance(each.weights, PagedWeights)
            self.buffers.memory.put(each.slot, each.pages, each.weights)

    def refill(self, rows: Sequence[SlotRows]) -> None:
        """Take over another batch, rows and all. Raises ValueError as `plan` does."""
        self.take(rows)
        self._fill()

    def numbers(self, num_rows: int) -> list[tuple[int, int, int]]:
        """What a table for this batch and so many rows holds."""
        return self._blocks.numbers(self._rows, self._blocks.num_blocks(num_rows))

    def _fill(self) -> None:
        if not self._is_filled:
            self._blocks.fill(self._rows)
            self._is_filled = True

    def apply(self, site: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """y and x contiguous, in the model's dtype. Raises ValueError otherwise, or where the batch has other sizes."""
        memory, shrunk = self.buffers.memory, self.buffers.shrunk
        place = memory.layout.sites[site]
        self._check("y", y, place.width, len(x))
        self._check("x", x, place.in_features, len(x))
        self._fill()
        splits = splits_of(len(x), place.in_features)
        shrink(shrunk, x, place, memory, self._blocks, splits.num_elements, self.buffers.limits.max_rank)
        columns = self.buffers.columns[place.slices]
        expand(y, shrunk, columns, place, memory, self._blocks, splits.num_splits, self.buffers.limits.max_rank)

    def embed(self, y: torch.Tensor, token_ids: torch.Tensor) -> None:
        """y and token_ids contiguous, y in the model's dtype. Raises ValueError otherwise, or where the batch has other sizes."""
        self._check("y", y, self.buffers.memory.layout.embedding.width, len(token_ids))
        self._fill()
        embed(y, token_ids, self.buffers.memory, self._blocks)

    def _check(self, name: str, tensor: torch.Tensor, width: int, num_rows: int) -> None:
        dtype = self.buffers.memory.layout.dtype
        if tensor.shape != (num_rows, width) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} [{num_rows}, {width}], not {tensor.dtype} {list(tensor.shape)}")
        if not self._num_rows <= num_rows <= self.buffers.limits.max_num_tokens:
            raise ValueError(f"{num_rows} rows for a plan of {self._num_rows}, of at most {self.buffers.limits.max_num_tokens}")
