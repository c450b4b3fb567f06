"""Heads of a stacked qkv row: q and k normed where the model norms them, and turned; then k and v into the KV cache, kept finite.

One launch in place of `reference/rms_norm.py`, `rope.py` and `kv_cache.py`, rounded where these round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from loramux.kernels.reference.kv_cache import LIMIT


class KvCache(NamedTuple):
    """Of one layer: a block's keys of one head lie together."""

    k: torch.Tensor
    """[num_blocks, Hkv, block_size, D], contiguous"""
    v: torch.Tensor


def rope_cache(
    qkv: torch.Tensor,
    head_norms: tuple[torch.Tensor, torch.Tensor] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: KvCache,
    kv_slots: torch.Tensor,
    eps: float,
) -> None:
    """Change the queries of qkv [T, (Hq + 2 * Hkv) * D] in place, and write the T tokens into the cache.

    head_norms are those of q and k, [D] each; cos, sin float32 [T, D], their halves equal; kv_slots int32 [T]. All contiguous, D even.
    """
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    num_rows, width = qkv.shape
    if num_rows == 0:
        return
    q_norm, k_norm = head_norms or (None, None)
    _rope_cache[(num_rows, width // head_dim)](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        cache.k,
        cache.v,
        kv_slots,
        width,
        width // head_dim - 2 * num_kv_heads,
        num_kv_heads,
        block_size,
        min(LIMIT, torch.finfo(qkv.dtype).max),
        eps,
        has_norms=head_norms is not None,
        head_dim=head_dim,
        half_block=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )


@triton.jit
def _rope_cache(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    kv_slots: tl.tensor,
    width: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    block_size: tl.tensor,
    limit: tl.tensor,
    eps: tl.tensor,
    has_norms: tl.constexpr,
    head_dim: tl.constexpr,
    half_block: tl.constexpr,
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = head_dim // 2
    lanes = tl.arange(0, half_block)
    inside = lanes < half
    source = qkv + row * width + head * head_dim + lanes
    first, second = tl.load(source, mask=inside, other=0.0), tl.load(source + half, mask=inside, other=0.0)
    is_query, is_value = head < num_heads, head >= num_heads + num_kv_heads
    if not is_value:
        if has_norms:
            norm = q_norm if is_query else k_norm
            first, second = _normed(first, second, norm + lanes, inside, eps, head_dim)
        angle = row * head_dim + lanes
        first, second = _turned(first, second, cos + angle, sin + angle, inside)
    if is_query:
        tl.store(source, first, mask=inside)
        tl.store(source + half, second, mask=inside)
    else:
        slot = tl.load(kv_slots + row).to(tl.int64)
        kv_head = (head - num_heads) % num_kv_heads
        cell = ((slot // block_size * num_kv_heads + kv_head) * block_size + slot % block_size) * head_dim
        cache = (v_cache if is_value else k_cache) + cell + lanes
        tl.store(cache, _storable(first, limit), mask=inside)
        tl.store(cache + half, _storable(second, limit), mask=inside)


@triton.jit
def _normed(first: tl.tensor, second: tl.tensor, norm: tl.tensor, inside: tl.tensor, eps: tl.tensor, head_dim: tl.constexpr) -> tl.tuple:
    """Both halves of a head, times the norm's."""
    dtype = first.dtype
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    factor = 1.0 / tl.sqrt_rn((tl.sum(wide_first * wide_first) + tl.sum(wide_second * wide_second)) / head_dim + eps)
    first_norm = tl.load(norm, mask=inside, other=0.0).to(tl.float32)
    second_norm = tl.load(norm + head_dim // 2, mask=inside, other=0.0).to(tl.float32)
    normed_first = (wide_first * factor).to(dtype).to(tl.float32) * first_norm
    normed_second = (wide_second * factor).to(dtype).to(tl.float32) * second_norm
    return normed_first.to(dtype), normed_second.to(dtype)


@triton.jit
def _turned(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor, inside: tl.tensor) -> tl.tuple:
    dtype = first.dtype
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    c, s = tl.load(cos, mask=inside, other=0.0), tl.load(sin, mask=inside, other=0.0)
    return (wide_first * c - wide_second * s).to(dtype), (wide_second * c + wide_first * s).to(dtype)


@triton.jit
def _storable(x: tl.tensor, limit: tl.tensor) -> tl.tensor:
    wide = x.to(tl.float32)
    wide = tl.where(wide == wide, wide, 0.0)
    return tl.minimum(tl.maximum(wide, -limit), limit).to(x.dtype)
