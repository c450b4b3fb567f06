"""y[t, columns of m] = gain * y[t, columns of m] + (sum over k of shrunk[k, m, t, :rank]) B[slot of t, m] + shift, for every module m.

shrunk float32 [num_splits, num_slices, T, max_rank], from `shrink`; y [T, width] in the model's dtype is changed in place, each element
rounded once. B and the vectors lie in pages (`layout`). A row whose adapter has nothing at the module is left alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.triton.layout import SitePlace
from loramux.kernels.triton.memory import SlotMemory
from loramux.kernels.triton.rows import RowBlocks
from loramux.kernels.triton.tiles import BLOCK_RANKS, b_tile, change_tile, rank_tile

BLOCK_COLUMNS = 128


def column_blocks(site: SitePlace) -> list[tuple[int, int, int]]:
    """(slice, out_start, out_end): what one program changes lies in one slice."""
    return [
        (index, column, min(column + BLOCK_COLUMNS, end))
        for index, (start, end) in enumerate(site.slices)
        for column in range(start, end, BLOCK_COLUMNS)
    ]


def expand(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    columns: torch.Tensor,
    site: SitePlace,
    memory: SlotMemory,
    blocks: RowBlocks,
    num_splits: int,
    max_rank: int,
) -> None:
    """columns int32 [num_column_blocks, 3]: `column_blocks` of the site; y contiguous."""
    num_rows, width = y.shape
    _expand[(blocks.num_blocks(num_rows), len(columns))](
        y,
        shrunk,
        columns,
        memory.pages,
        memory.vectors,
        memory.table,
        blocks.table,
        num_rows,
        len(site.slices),
        width,
        site.b_start,
        site.vector_start,
        memory.layout.page_elements,
        memory.vectors.shape[1],
        memory.table.shape[1],
        memory.rank_column + site.module_start,
        memory.vector_column + site.module_start,
        max_rank=max_rank,
        num_splits=num_splits,
        block_rows=blocks.block_rows,
        block_ranks=BLOCK_RANKS,
        block_columns=BLOCK_COLUMNS,
        precision=dot_precision(y.dtype),
    )


def dot_precision(dtype: torch.dtype) -> str:
    """Of a product of float32 with B in this dtype: tf32 holds every float16 and bfloat16, and more of the other than they would."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit(do_not_specialize=["num_rows", "num_slices", "row_length", "rank_column", "vector_column"])
def _expand(
    y: tl.tensor,
    shrunk: tl.tensor,
    columns_of: tl.tensor,
    pages: tl.tensor,
    vectors: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    num_rows: tl.tensor,
    num_slices: tl.tensor,
    width: tl.tensor,
    b_start: tl.tensor,
    vector_start: tl.tensor,
    page_elements: tl.tensor,
    vector_page_elements: tl.tensor,
    row_length: tl.tensor,
    rank_column: tl.tensor,
    vector_column: tl.tensor,
    max_rank: tl.constexpr,
    num_splits: tl.constexpr,
    block_rows: tl.constexpr,
    block_ranks: tl.constexpr,
    block_columns: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    block, column_block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(blocks + 3 * block)
    if slot < 0:
        return
    piece = tl.load(columns_of + 3 * column_block)
    of_slot = table + slot * row_length
    num_ranks = tl.load(of_slot + rank_column + piece)
    vector_page = tl.load(of_slot + vector_column + piece)
    if (num_ranks == 0) & (vector_page < 0):
        return
    rows = tl.load(blocks + 3 * block + 1).to(tl.int64) + tl.arange(0, block_rows)
    mine = rows < tl.load(blocks + 3 * block + 2)
    columns = tl.load(columns_of + 3 * column_block + 1) + tl.arange(0, block_columns)
    inside = columns < tl.load(columns_of + 3 * column_block + 2)
    delta = tl.full((block_rows, block_columns), 0.0, tl.float32)
    for first in range(0, num_ranks, block_ranks):
        ranks, exist, starts = rank_tile(of_slot, first, num_ranks, page_elements, block_ranks)
        sums = tl.full((block_rows, block_ranks), 0.0, tl.float32)
        for split in tl.static_range(num_splits):
            shrunk_rows = ((split * num_slices + piece) * num_rows + rows) * max_rank
            sums += tl.load(shrunk + shrunk_rows[:, None] + ranks[None, :], mask=mine[:, None] & exist[None, :], other=0.0)
        b = b_tile(pages + b_start, ranks, exist, starts, width, columns, inside)
        delta = tl.dot(sums, b, delta, input_precision=precision)
    gain = vectors + vector_page.to(tl.int64) * vector_page_elements + vector_start
    offsets, mask = rows[:, None] * width + columns[None, :], mine[:, None] & inside[None, :]
    change_tile(y, offsets, mask, delta, gain, width, columns, inside, vector_page)
