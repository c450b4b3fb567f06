"""y[t] = gain * y[t] + A[slot of t][token of t, :rank] B[slot of t]

token_ids int64 [T]; y [T, hidden] in the model's dtype is changed in place, each element rounded once. A [vocab, rank], B [rank, hidden]
and gain lie in pages (`layout`). A row whose adapter has nothing at the embedding is left alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.triton.expand import BLOCK_COLUMNS, dot_precision
from loramux.kernels.triton.memory import SlotMemory
from loramux.kernels.triton.rows import RowBlocks
from loramux.kernels.triton.tiles import BLOCK_RANKS, RANKS, b_tile, change_tile, rank_tile


def embed(y: torch.Tensor, token_ids: torch.Tensor, memory: SlotMemory, blocks: RowBlocks) -> None:
    """y and token_ids contiguous; every token is one of the base's vocabulary."""
    num_rows, width = y.shape
    site = memory.layout.embedding
    _embed[(blocks.num_blocks(num_rows), triton.cdiv(width, BLOCK_COLUMNS))](
        y,
        token_ids,
        memory.pages,
        memory.vectors,
        memory.table,
        blocks.table,
        width,
        site.a_start,
        site.b_start,
        site.vector_start,
        memory.layout.page_elements,
        memory.vectors.shape[1],
        memory.table.shape[1],
        memory.rank_column + site.module_start,
        memory.vector_column + site.module_start,
        block_rows=blocks.block_rows,
        block_ranks=BLOCK_RANKS,
        block_columns=BLOCK_COLUMNS,
        precision=dot_precision(y.dtype),
    )


@triton.jit
def _embed(
    y: tl.tensor,
    token_ids: tl.tensor,
    pages: tl.tensor,
    vectors: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    width: tl.tensor,
    a_start: tl.tensor,
    b_start: tl.tensor,
    vector_start: tl.tensor,
    page_elements: tl.tensor,
    vector_page_elements: tl.tensor,
    row_length: tl.tensor,
    rank_column: tl.tensor,
    vector_column: tl.tensor,
    block_rows: tl.constexpr,
    block_ranks: tl.constexpr,
    block_columns: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    block, column_block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(blocks + 3 * block)
    if slot < 0:
        return
    of_slot = table + slot * row_length
    num_ranks = tl.load(of_slot + rank_column)
    vector_page = tl.load(of_slot + vector_column)
    if (num_ranks == 0) & (vector_page < 0):
        return
    rows = tl.load(blocks + 3 * block + 1).to(tl.int64) + tl.arange(0, block_rows)
    mine = rows < tl.load(blocks + 3 * block + 2)
    columns = column_block * block_columns + tl.arange(0, block_columns)
    inside = columns < width
    a_rows = a_start + tl.load(token_ids + rows, mask=mine, other=0) * RANKS
    delta = tl.full((block_rows, block_columns), 0.0, tl.float32)
    for first in range(0, num_ranks, block_ranks):
        ranks, exist, starts = rank_tile(of_slot, first, num_ranks, page_elements, block_ranks)
        a_columns = starts + ranks % RANKS
        a = tl.load(pages + a_rows[:, None] + a_columns[None, :], mask=mine[:, None] & exist[None, :], other=0.0).to(tl.float32)
        b = b_tile(pages + b_start, ranks, exist, starts, width, columns, inside)
        delta = tl.dot(a, b, delta, input_precision=precision)
    gain = vectors + vector_page.to(tl.int64) * vector_page_elements + vector_start
    offsets, mask = rows[:, None] * width + columns[None, :], mine[:, None] & inside[None, :]
    change_tile(y, offsets, mask, delta, gain, width, columns, inside, vector_page)
