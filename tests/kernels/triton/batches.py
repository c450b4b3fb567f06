"""Random batches over shuffled KV blocks, as attention's tests take them."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from loramux.kernels.ops import AttentionBatch
from loramux.kernels.triton.rope_cache import KvCache


class Paged(NamedTuple):
    batch: AttentionBatch
    num_blocks: int


def paged_batch(rng: random.Random, sequences: list[tuple[int, int]], block_size: int) -> Paged:
    """sequences are (context, queries)."""
    counts = [-(-context // block_size) for context, _ in sequences]
    blocks = list(range(sum(counts) + 2))
    rng.shuffle(blocks)
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int64)
    slots: list[int] = []
    starts = [0]
    for s, (context, queries) in enumerate(sequences):
        own = [blocks.pop() for _ in range(counts[s])]
        tables[s, : len(own)] = torch.tensor(own)
        slots += [own[at // block_size] * block_size + at % block_size for at in range(context - queries, context)]
        starts.append(starts[-1] + queries)
    batch = AttentionBatch(tuple(starts), tuple(context for context, _ in sequences), tables, torch.tensor(slots))
    return Paged(batch, sum(counts) + 2)


def by_head(k_cache: torch.Tensor, v_cache: torch.Tensor) -> KvCache:
    """The reference's caches [num_blocks, block_size, Hkv, D] in the layout of Triton's."""
    return KvCache(k_cache.transpose(1, 2).contiguous(), v_cache.transpose(1, 2).contiguous())
