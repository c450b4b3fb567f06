"""softmax(scale * q k^T) v over each sequence's KV blocks, causal, with an optional sliding window, read where they lie.

A program takes a piece (some query rows of one sequence) with all query heads of one key head, and one part of the keys, under an online
softmax in float32 (FlashAttention-2, arXiv 2307.08691). Where pieces are few their keys are split over programs, whose parts a second
kernel adds up (Flash-Decoding). Decodes and chunks of prompts are pieces of different heights, in a launch each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from loramux.kernels.triton.rope_cache import KvCache
from loramux.kernels.triton.tiles import INTERPRETED

MIN_BLOCK_ROWS = 16
"""The least that a tensor core takes."""


class PieceGroup(NamedTuple):
    """Pieces of one launch."""

    pieces: torch.Tensor
    """int32 [P, 4]: first row of the batch, number of rows, position of the first, where its blocks begin in the list of block tables."""
    block_queries: int
    """The most rows that a piece has."""
    num_splits: int
    """Parts that keys are split into; a power of two."""


class HeadShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def group_block(self) -> int:
        return int(triton.next_power_of_2(self.group))


def block_keys_of(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile: two of keys and two of values stay under 99 KiB."""
    return 64 if head_dim * dtype.itemsize <= 256 else 32


def paged_attention(
    out: torch.Tensor,
    qkv: torch.Tensor,
    cache: KvCache,
    group: PieceGroup,
    block_tables: torch.Tensor,
    heads: HeadShape,
    scale: float,
    window: int | None,
) -> None:
    """Fill the pieces' rows of out [T, Hq * D].

    qkv [T, >= Hq * D] begins with the queries; block_tables int32 [any], blocks of one piece one after another. Every element of a
    sequence's own cells is finite. All contiguous.
    """
    num_rows = len(out)
    splits = group.num_splits
    partial = (
        torch.empty((splits, num_rows, heads.num_heads, heads.head_dim), dtype=torch.float32, device=out.device) if splits > 1 else out
    )
    lse = torch.empty((splits, num_rows, heads.num_heads), dtype=torch.float32, device=out.device) if splits > 1 else out
    head_block = max(16, triton.next_power_of_2(heads.head_dim))
    _paged_attention[(len(group.pieces), heads.num_kv_heads, splits)](
        partial,
        lse,
        qkv,
        cache.k,
        cache.v,
        group.pieces,
        block_tables,
        qkv.shape[1],
        num_rows,
        heads.num_kv_heads,
        scale * math.log2(math.e),
        window or 0,
        has_window=window is not None,
        num_splits=splits,
        group=heads.group,
        group_block=heads.group_block,
        block_rows=max(MIN_BLOCK_ROWS, group.block_queries * heads.group_block),
        block_keys=block_keys_of(heads.head_dim, qkv.dtype),
        block_size=cache.k.shape[2],
        head_dim=heads.head_dim,
        head_block=head_block,
        widen=INTERPRETED,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _combine[(len(group.pieces) * group.block_queries, heads.num_heads)](
            out,
            partial,
            lse,
            group.pieces,
            num_rows,
            heads.num_heads,
            block_queries=group.block_queries,
            num_splits=splits,
            head_dim=heads.head_dim,
            head_block=head_block,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["num_rows", "num_kv_heads", "window"])
def _paged_attention(
    out: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    pieces: tl.tensor,
    block_tables: tl.tensor,
    q_width: tl.tensor,
    num_rows: tl.tensor,
    num_kv_heads: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    has_window: tl.constexpr,
    num_splits: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    head_block: tl.constexpr,
    widen: tl.constexpr,
) -> None:
    """out [T, Hq, D] in q's dtype; where keys are split float32 [num_splits, T, Hq, D], and lse [num_splits, T, Hq] to base 2."""
    piece, kv_head, split = pieces + 4 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_queries, position, table = tl.load(piece + 1), tl.load(piece + 2), block_tables + tl.load(piece + 3)
    lanes = tl.arange(0, block_rows)
    query, member = lanes // group_block, lanes % group_block
    mine = (query < num_queries) & (member < group)
    rows = tl.load(piece).to(tl.int64) + query
    heads = kv_head * group + member
    dims = tl.arange(0, head_block)
    present = mine[:, None] & (dims < head_dim)[None, :]
    q_tile = tl.load(q + rows[:, None] * q_width + heads[:, None] * head_dim + dims[None, :], mask=present, other=0.0)
    if widen:
        q_tile = q_tile.to(tl.float32)

    first_key, end = _split_of(position, num_queries, window, split, has_window, num_splits, block_keys)
    peak = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.full((block_rows,), 0.0, tl.float32)
    sums = tl.full((block_rows, head_block), 0.0, tl.float32)
    for first in range(first_key, end, block_keys):
        keys = first + tl.arange(0, block_keys)
        exist = keys < end
        blocks = tl.load(table + keys // block_size, mask=exist, other=0).to(tl.int64)
        cells = ((blocks * num_kv_heads + kv_head) * block_size + keys % block_size) * head_dim
        k = tl.load(k_cache + cells[None, :] + dims[:, None], mask=exist[None, :] & (dims < head_dim)[:, None], other=0.0)
        v = tl.load(v_cache + cells[:, None] + dims[None, :], mask=exist[:, None] & (dims < head_dim)[None, :], other=0.0)
        if widen:
            k, v = k.to(tl.float32), v.to(tl.float32)
        seen = exist[None, :] & (keys[None, :] <= position + query[:, None])
        if has_window:
            seen = seen & (keys[None, :] > position + query[:, None] - window)
        scores = tl.where(seen, tl.dot(q_tile, k, input_precision="ieee") * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        powers = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(powers, 1)
        sums = tl.dot(powers.to(v.dtype), v, sums * decay[:, None], input_precision="ieee")
        peak = new_peak

    num_heads = num_kv_heads * group
    places = (split.to(tl.int64) * num_rows + rows) * num_heads + heads
    total = tl.where(total == 0.0, 1.0, total)
    mean = sums / total[:, None]
    tl.store(out + places[:, None] * head_dim + dims[None, :], mean.to(out.dtype.element_ty), mask=present)
    if num_splits > 1:
        tl.store(lse + places, peak + tl.log2(total), mask=mine)


@triton.jit
def _split_of(
    position: tl.tensor,
    num_queries: tl.tensor,
    window: tl.tensor,
    split: tl.tensor,
    has_window: tl.constexpr,
    num_splits: tl.constexpr,
    block_keys: tl.constexpr,
) -> tl.tuple:
    """First key and end of one split's whole tiles of a piece's keys; perhaps none."""
    end = position + num_queries
    begin = 0
    if has_window:
        begin = tl.maximum(position - window + 1, 0) // block_keys * block_keys
    keys_of_all = num_splits * block_keys
    width = (end - begin + keys_of_all - 1) // keys_of_all * block_keys
    first = begin + split * width
    return first, tl.minimum(first + width, end)


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _combine(
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    pieces: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    block_queries: tl.constexpr,
    num_splits: tl.constexpr,
    head_dim: tl.constexpr,
    head_block: tl.constexpr,
) -> None:
    """out [T, Hq, D] of a piece's rows: the parts' mean, weighed by how much softmax each of them saw."""
    piece, query, head = pieces + 4 * (tl.program_id(0) // block_queries), tl.program_id(0) % block_queries, tl.program_id(1)
    if query >= tl.load(piece + 1):
        return
    row = tl.load(piece).to(tl.int64) + query
    places = (tl.arange(0, num_splits).to(tl.int64) * num_rows + row) * num_heads + head
    dims = tl.arange(0, head_block)
    logs = tl.load(lse + places)
    weights = tl.exp2(logs - tl.max(logs, 0))
    parts = tl.load(partial + places[:, None] * head_dim + dims[None, :], mask=(dims < head_dim)[None, :], other=0.0)
    mean = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + (row * num_heads + head) * head_dim + dims, mean.to(out.dtype.element_ty), mask=dims < head_dim)
