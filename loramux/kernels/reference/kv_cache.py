"""cache[slot // block_size, slot % block_size] = row, for keys and values, kept finite.

A padded or masked read touches cells of other sequences, and 0 * NaN is NaN: a value that overflowed under one adapter must not reach
whoever reads past the end of a block. A key within the limit can't overflow the product with any query of a working model.
"""

from __future__ import annotations

import torch

LIMIT = 1e30
"""Largest magnitude stored."""


def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_slots: torch.Tensor) -> None:
    """k, v [T, Hkv, D] into caches [num_blocks, block_size, Hkv, D] (contiguous) at kv_slots int64 [T]; NaN becomes 0."""
    k_cache.flatten(0, 1).index_copy_(0, kv_slots, _storable(k))
    v_cache.flatten(0, 1).index_copy_(0, kv_slots, _storable(v))


def _storable(x: torch.Tensor) -> torch.Tensor:
    limit = min(LIMIT, torch.finfo(x.dtype).max)
    return x.nan_to_num(0.0).clamp_(-limit, limit)
