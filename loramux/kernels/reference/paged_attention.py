"""softmax(scale * q k^T) v over each sequence's KV blocks, causal, with an optional sliding window.

Sequences with one query row are attended together, padded to the longest of them; a prompt's chunk is attended alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from loramux.kernels.ops import AttentionBatch


@dataclass(frozen=True)
class DecodeGroup:
    """The B sequences that have one query row each; L is the padded context."""

    rows: torch.Tensor
    """int64 [B]"""
    blocks: torch.Tensor
    """int64 [B, L / block_size]"""
    mask: torch.Tensor
    """bool [B, 1, 1, L], True where attended"""


@dataclass(frozen=True)
class PrefillChunk:
    """Rows [start, end) of one sequence; L is its context, this chunk included."""

    start: int
    end: int
    context_len: int
    blocks: torch.Tensor
    """int64 [ceil(L / block_size)]"""
    mask: torch.Tensor | None
    """bool [end - start, L]; None is plain causal with nothing before the chunk"""


@dataclass(frozen=True)
class AttentionPlan:
    """Masks and gathers of a batch, the same for every layer with the same window."""

    decode: DecodeGroup | None
    chunks: tuple[PrefillChunk, ...]


def plan_attention(batch: AttentionBatch, block_size: int, window: int | None) -> AttentionPlan:
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    single = [s for s, (start, end) in enumerate(zip(starts, ends, strict=True)) if end - start == 1]
    longer = [s for s, (start, end) in enumerate(zip(starts, ends, strict=True)) if end - start > 1]
    decode = _plan_decode(batch, single, block_size, window) if single else None
    return AttentionPlan(decode, tuple(_plan_chunk(batch, s, block_size, window) for s in longer))


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """q [T, Hq, D]; caches [num_blocks, block_size, Hkv, D], every element finite -> [T, Hq, D]. Rows of no sequence are 0."""
    out = torch.zeros_like(q)
    if plan.decode is not None:
        out[plan.decode.rows] = _attend_decode(q[plan.decode.rows], k_cache, v_cache, plan.decode, scale)
    for chunk in plan.chunks:
        out[chunk.start : chunk.end] = _attend_chunk(q[chunk.start : chunk.end], k_cache, v_cache, chunk, scale)
    return out


def _attended(query_positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """bool [..., num_keys] for int64 query_positions [..., 1]."""
    keys = torch.arange(num_keys, device=query_positions.device)
    mask = keys <= query_positions
    return mask if window is None else mask & (keys > query_positions - window)


def _plan_decode(batch: AttentionBatch, sequences: list[int], block_size: int, window: int | None) -> DecodeGroup:
    device = batch.block_tables.device
    context_lens = [batch.context_lens[s] for s in sequences]
    num_blocks = -(-max(context_lens) // block_size)
    positions = torch.tensor(context_lens, device=device).view(-1, 1, 1, 1) - 1
    return DecodeGroup(
        rows=torch.tensor([batch.query_starts[s] for s in sequences], device=device),
        blocks=batch.block_tables[torch.tensor(sequences, device=device), :num_blocks],
        mask=_attended(positions, num_blocks * block_size, window),
    )


def _plan_chunk(batch: AttentionBatch, sequence: int, block_size: int, window: int | None) -> PrefillChunk:
    start, end = batch.query_starts[sequence], batch.query_starts[sequence + 1]
    context_len = batch.context_lens[sequence]
    blocks = batch.block_tables[sequence, : -(-context_len // block_size)]
    if end - start == context_len and (window is None or window >= context_len):
        return PrefillChunk(start, end, context_len, blocks, None)
    positions = torch.arange(context_len - (end - start), context_len, device=blocks.device).unsqueeze(1)
    return PrefillChunk(start, end, context_len, blocks, _attended(positions, context_len, window))


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[..., num_blocks] of block indices -> [..., num_blocks * block_size, Hkv, D]"""
    picked = cache.index_select(0, blocks.flatten())
    return picked.view(*blocks.shape[:-1], -1, *cache.shape[2:])


def _attend_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: DecodeGroup, scale: float) -> torch.Tensor:
    """The query heads of one key head stand in for query rows, so that keys are not repeated (as fast as `enable_gqa`, or faster)."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    k, v = (_gather(cache, group.blocks).transpose(1, 2) for cache in (k_cache, v_cache))
    grouped = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=scale).reshape(q.shape)


def _attend_chunk(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, chunk: PrefillChunk, scale: float) -> torch.Tensor:
    k, v = (_gather(cache, chunk.blocks)[: chunk.context_len].transpose(0, 1).unsqueeze(0) for cache in (k_cache, v_cache))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)
