"""cache[slot // block_size, slot % block_size] = row, for keys and values."""

from __future__ import annotations

import torch


def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_slots: torch.Tensor) -> None:
    """k, v [T, Hkv, D] into caches [num_blocks, block_size, Hkv, D] (contiguous) at kv_slots int64 [T]."""
    k_cache.flatten(0, 1).index_copy_(0, kv_slots, k)
    v_cache.flatten(0, 1).index_copy_(0, kv_slots, v)
