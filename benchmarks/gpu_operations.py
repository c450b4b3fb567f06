"""Every operation that a decoder and a sampler are made of, once by the torch reference and once by Triton, on the same random tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from loramux.kernels.ops import AttentionBatch, SamplingRow
from loramux.kernels.reference import apply_bitmask as reference_bitmask
from loramux.kernels.reference import kv_cache, rms_norm, rope, sampling
from loramux.kernels.reference import paged_attention as reference_attention
from loramux.kernels.reference import silu_mul as reference_silu_mul
from loramux.kernels.triton import apply_bitmask as triton_bitmask
from loramux.kernels.triton import paged_attention as triton_attention
from loramux.kernels.triton import sampling as triton_sampling
from loramux.kernels.triton.add_rms_norm import add_rms_norm as triton_add_rms_norm
from loramux.kernels.triton.paged_attention import HeadShape, PieceGroup, block_keys_of
from loramux.kernels.triton.pieces import Cutter
from loramux.kernels.triton.rope_cache import KvCache
from loramux.kernels.triton.rope_cache import rope_cache as triton_rope_cache
from loramux.kernels.triton.silu_mul import silu_mul as triton_silu_mul
from loramux.kernels.triton.step_inputs import flat_tables

HIDDEN, BLOCK_SIZE, VOCAB_SIZE = 576, 32, 49157
HEADS = (HeadShape(9, 3, 64), HeadShape(8, 1, 128))
CONTEXTS, QUERIES = (1, 33, 97, 131, 1000), (1, 1, 17, 131, 1)
NUM_TOKENS = sum(QUERIES)
NUM_DRAWS = 16


class Place(NamedTuple):
    """Where a case runs. Its tensors are drawn on the CPU in float32, so that every place sees the same ones."""

    device: str
    dtype: torch.dtype
    is_reference: bool
    generator: torch.Generator

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=self.generator)).to(self.device, self.dtype)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


def add_rms_norm(place: Place) -> torch.Tensor:
    residual, delta, weight = place.randn(NUM_TOKENS, HIDDEN), place.randn(NUM_TOKENS, HIDDEN), place.randn(HIDDEN)
    if place.is_reference:
        residual = residual + delta
        return torch.cat((residual, rms_norm.rms_norm(residual, weight, 1e-5)))
    normed = triton_add_rms_norm(residual, delta, weight, 1e-5)
    return torch.cat((residual, normed))


def silu_mul(place: Place) -> torch.Tensor:
    gate_up = place.randn(NUM_TOKENS, 2 * 1536)
    return reference_silu_mul.silu_mul(gate_up) if place.is_reference else triton_silu_mul(gate_up)


def rope_cache(place: Place) -> torch.Tensor:
    """Queries, and what the caches hold afterwards."""
    heads, num_blocks = HEADS[0], -(-NUM_TOKENS // BLOCK_SIZE)
    qkv = place.randn(NUM_TOKENS, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    q_norm, k_norm = place.randn(heads.head_dim), place.randn(heads.head_dim)
    angles = torch.rand(NUM_TOKENS, heads.head_dim // 2, generator=place.generator).repeat(1, 2) * 100
    cos, sin = place.put(angles.cos()), place.put(angles.sin())
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=place.generator)[:NUM_TOKENS]
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    if place.is_reference:
        k_cache, v_cache = torch.zeros(2, num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype=place.dtype)
        q, k, v = qkv.view(NUM_TOKENS, -1, heads.head_dim).split(sizes, dim=1)
        q, k = (rope.rope(rms_norm.rms_norm(x, norm, 1e-5), cos, sin) for x, norm in ((q, q_norm), (k, k_norm)))
        kv_cache.write_kv(k, v, k_cache, v_cache, slots)
        return torch.cat((q.flatten(), k_cache.transpose(1, 2).flatten(), v_cache.transpose(1, 2).flatten()))
    cache = KvCache(*place.put(torch.zeros(2, num_blocks, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim, dtype=place.dtype)))
    triton_rope_cache(qkv, (q_norm, k_norm), cos, sin, cache, place.put(slots.int()), 1e-5)
    return torch.cat((qkv[:, : heads.num_heads * heads.head_dim].flatten(), cache.k.flatten(), cache.v.flatten()))


def attention(place: Place, heads: HeadShape = HEADS[0], window: int | None = None, num_programs: int = 1) -> torch.Tensor:
    """Decodes and chunks of prompts, over shuffled blocks; keys are split where there are to be more programs than pieces."""
    max_blocks = -(-max(CONTEXTS) // BLOCK_SIZE)
    blocks = torch.randperm(len(CONTEXTS) * max_blocks, generator=place.generator).view(len(CONTEXTS), max_blocks)
    starts = (0, *torch.tensor(QUERIES).cumsum(0).tolist())
    batch = AttentionBatch(starts, CONTEXTS, blocks, torch.zeros(NUM_TOKENS, dtype=torch.int64))
    k_cache, v_cache = (place.randn(blocks.numel(), BLOCK_SIZE, heads.num_kv_heads, heads.head_dim) for _ in range(2))
    q, scale = place.randn(NUM_TOKENS, heads.num_heads, heads.head_dim), heads.head_dim**-0.5
    if place.is_reference:
        plan = reference_attention.plan_attention(batch, BLOCK_SIZE, window)
        return reference_attention.paged_attention(q, k_cache, v_cache, plan, scale).flatten(1)
    tables, table_starts = flat_tables(batch, BLOCK_SIZE, scratch_block=0)
    cache = KvCache(k_cache.transpose(1, 2).contiguous(), v_cache.transpose(1, 2).contiguous())
    out = torch.empty_like(q.flatten(1))
    for group in Cutter(heads, block_keys_of(heads.head_dim, place.dtype), num_programs).cut(batch, table_starts):
        pieces = PieceGroup(place.put(torch.tensor(group.pieces, dtype=torch.int32)), group.block_queries, group.num_splits)
        on_device = place.put(torch.from_numpy(tables))
        triton_attention.paged_attention(out, q.flatten(1), cache, pieces, on_device, heads, scale, window)
    return out


def wide_attention(place: Place) -> torch.Tensor:
    return attention(place, HEADS[1])


def split_attention(place: Place) -> torch.Tensor:
    return attention(place, num_programs=1000)


def windowed_attention(place: Place) -> torch.Tensor:
    return attention(place, window=41, num_programs=1000)


def apply_bitmask(place: Place) -> torch.Tensor:
    """-inf becomes 1e4, so that differences are finite."""
    logits = place.put(torch.randn(7, VOCAB_SIZE, generator=place.generator))
    bitmask = torch.randint(-(2**31), 2**31, (5, -(-VOCAB_SIZE // 32)), generator=place.generator).to(torch.int32)
    apply = reference_bitmask.apply_bitmask if place.is_reference else triton_bitmask.apply_bitmask
    apply(logits, bitmask, torch.tensor([6, 0, 3, 2, 5]))
    return logits.masked_fill(logits.isinf(), 1e4)


def choose_tokens(place: Place) -> torch.Tensor:
    """Every way to draw, many times. Of the tokens a remainder, so that another token is over the tolerance of float32."""
    ways = [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.0, 40, 1.0, 0.0), (0.7, 0, 0.95, 0.0), (1.3, 100, 0.9, 0.05), (1.0, 0, 1.0, 0.1)]
    logits = place.put(torch.randn(NUM_DRAWS * len(ways), VOCAB_SIZE, generator=place.generator) * 3)
    noise = torch.rand(len(logits), generator=place.generator, dtype=torch.float64).tolist()
    rows = [SamplingRow(*ways[index % len(ways)], each) for index, each in enumerate(noise)]
    choose = sampling.choose_tokens if place.is_reference else triton_sampling.choose_tokens
    return torch.tensor(choose(logits, rows)) % 997


CASES: tuple[Callable[[Place], torch.Tensor], ...] = (
    add_rms_norm,
    silu_mul,
    rope_cache,
    attention,
    wide_attention,
    split_attention,
    windowed_attention,
    apply_bitmask,
    choose_tokens,
)
