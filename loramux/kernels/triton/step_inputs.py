"""What a forward pass needs besides weights, as one buffer of 32-bit words that is moved to the device at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loramux.kernels.ops import AttentionBatch
from loramux.kernels.triton.paged_attention import PieceGroup
from loramux.kernels.triton.pieces import HostPieces

_ALIGNMENT = 32
"""Words: a line of the GPU's cache; and the 16 bytes by which Triton tells that wide loads are allowed."""

Array = NDArray[Any]
"""Of int32 or float32."""


class StepInputs(NamedTuple):
    """On the device: views of one buffer."""

    token_ids: torch.Tensor
    """int32 [T]"""
    kv_slots: torch.Tensor
    """int32 [T]"""
    cos: torch.Tensor
    """float32 [T, D]"""
    sin: torch.Tensor
    logit_rows: torch.Tensor
    """int32 [R]"""
    row_blocks: torch.Tensor
    """int32 [N, 3], as `RowBlocks.table`, of a captured plan; else none."""
    groups: tuple[PieceGroup, ...]
    block_tables: torch.Tensor
    """int32 [any]: block tables one after another."""


class HostInputs(NamedTuple):
    """The same in host memory, dtypes as there."""

    token_ids: Array
    kv_slots: Array
    cos: Array
    sin: Array
    logit_rows: Array
    row_blocks: Array
    groups: tuple[HostPieces, ...]
    block_tables: Array

    def arrays(self) -> list[Array]:
        """In the buffer's order; block tables, whose length varies, are the last."""
        pieces: list[Array] = [np.array(group.pieces, dtype=np.int32).reshape(-1, 4) for group in self.groups]
        return [*self[:6], *pieces, self.block_tables]

    def views(self, buffer: torch.Tensor) -> StepInputs:
        """Of a buffer int32 that holds what `pack` made, or will."""
        token_ids, kv_slots, cos, sin, logit_rows, row_blocks, *pieces, block_tables = _views(buffer, self.arrays())
        groups = tuple(PieceGroup(each, group.block_queries, group.num_splits) for each, group in zip(pieces, self.groups, strict=True))
        return StepInputs(token_ids, kv_slots, cos, sin, logit_rows, row_blocks, groups, block_tables)


def pack(inputs: HostInputs, *, pinned: bool) -> torch.Tensor:
    """int32, on the host, in memory of its own: the one before may still be on its way."""
    arrays = inputs.arrays()
    starts = _starts(arrays)
    packed = torch.empty(starts[-1], dtype=torch.int32, pin_memory=pinned)
    words = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        words[start : start + array.size] = array.reshape(-1).view(np.int32)
    return packed


def flat_tables(batch: AttentionBatch, block_size: int, scratch_block: int) -> tuple[Array, list[int]]:
    """The blocks of every sequence one after another, behind one scratch block; and where each sequence's begin."""
    num_blocks = (np.array(batch.context_lens) + block_size - 1) // block_size
    tables = batch.block_tables.numpy()
    used = tables[np.arange(tables.shape[1]) < num_blocks[:, None]]
    return np.concatenate(([scratch_block], used)).astype(np.int32), [1, *(1 + num_blocks.cumsum()[:-1]).tolist()]


def _starts(arrays: Sequence[Array]) -> list[int]:
    """Of each array, and the end of the last."""
    starts = [0]
    for array in arrays:
        starts.append(-(-(starts[-1] + array.size) // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _views(buffer: torch.Tensor, arrays: Sequence[Array]) -> Iterator[torch.Tensor]:
    for start, array in zip(_starts(arrays), arrays, strict=False):
        part = buffer[start : start + array.size].view(array.shape)
        yield part.view(torch.float32) if array.dtype == np.float32 else part
