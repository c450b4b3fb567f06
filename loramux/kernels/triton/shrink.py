"""shrunk[k, m, t, :rank] = sum over i in part k of x[t, i] * A[slot of t, m][:rank, i], for every module m of a fused layer.

x [T, in_features] in the model's dtype -> shrunk float32 [num_splits, num_slices, T, max_rank], of which other elements are left alone.
A lies in pages (`layout`). The sum over `in_features` is split over programs so that few rows keep many of them busy; `expand` adds the
parts in order, so that the same batch gives the same bits. After Punica's SGMV and vLLM's lora_shrink, without their atomic additions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.triton.layout import SitePlace
from loramux.kernels.triton.memory import SlotMemory
from loramux.kernels.triton.rows import RowBlocks
from loramux.kernels.triton.tiles import BLOCK_RANKS, INTERPRETED, RANKS, rank_tile

BLOCK_INNER = 128
"""Elements of x and A that a step of the sum takes."""


def shrink(
    shrunk: torch.Tensor, x: torch.Tensor, site: SitePlace, memory: SlotMemory, blocks: RowBlocks, split_elements: int, max_rank: int
) -> None:
    """shrunk float32, contiguous, as large as above or larger; x contiguous; `split_elements` of in_features go into each part."""
    num_rows, in_features = x.shape
    grid = (blocks.num_blocks(num_rows), len(site.slices), triton.cdiv(in_features, split_elements))
    _shrink[grid](
        shrunk,
        x,
        memory.pages,
        memory.table,
        blocks.table,
        num_rows,
        in_features,
        split_elements,
        site.a_start,
        memory.layout.page_elements,
        memory.table.shape[1],
        memory.rank_column + site.module_start,
        max_rank=max_rank,
        block_rows=blocks.block_rows,
        block_ranks=BLOCK_RANKS,
        block_inner=BLOCK_INNER,
        widen=INTERPRETED,
    )


@triton.jit(do_not_specialize=["num_rows", "row_length", "rank_column"])
def _shrink(
    shrunk: tl.tensor,
    x: tl.tensor,
    pages: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    num_rows: tl.tensor,
    in_features: tl.tensor,
    split_elements: tl.tensor,
    a_start: tl.tensor,
    page_elements: tl.tensor,
    row_length: tl.tensor,
    rank_column: tl.tensor,
    max_rank: tl.constexpr,
    block_rows: tl.constexpr,
    block_ranks: tl.constexpr,
    block_inner: tl.constexpr,
    widen: tl.constexpr,
) -> None:
    block, piece, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(blocks + 3 * block)
    if slot < 0:
        return
    rows = tl.load(blocks + 3 * block + 1).to(tl.int64) + tl.arange(0, block_rows)
    mine = rows < tl.load(blocks + 3 * block + 2)
    of_slot = table + slot * row_length
    num_ranks = tl.load(of_slot + rank_column + piece)
    inner_end = tl.minimum((split + 1) * split_elements, in_features)
    for first in range(0, num_ranks, block_ranks):
        ranks, exist, starts = rank_tile(of_slot, first, num_ranks, page_elements, block_ranks)
        a_rows = pages + a_start + starts + (piece * RANKS + ranks % RANKS) * in_features
        sums = tl.full((block_rows, block_ranks), 0.0, tl.float32)
        for inner in range(split * split_elements, inner_end, block_inner):
            at = inner + tl.arange(0, block_inner)
            inside = at < inner_end
            x_tile = tl.load(x + rows[:, None] * in_features + at[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            a_tile = tl.load(a_rows[None, :] + at[:, None], mask=exist[None, :] & inside[:, None], other=0.0)
            if widen:
                x_tile, a_tile = x_tile.to(tl.float32), a_tile.to(tl.float32)
            sums = tl.dot(x_tile, a_tile, sums, input_precision="ieee")
        shrunk_rows = ((split * tl.num_programs(1) + piece) * num_rows + rows) * max_rank
        tl.store(shrunk + shrunk_rows[:, None] + ranks[None, :], sums, mask=mine[:, None] & exist[None, :])
