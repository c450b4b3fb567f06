"""The operations a model and a sampler are made of, as one interface; `select.py` chooses who implements it, once, at start.

The torch functions in `kernels/reference/` define each operation; every other implementation must agree with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """Where each sequence's tokens of this step lie in the batch and in the KV blocks. Filled by the runner, once a step.

    Sequence s owns rows [query_starts[s], query_starts[s + 1]) of the batch: the last of its context_lens[s] tokens.
    """

    query_starts: tuple[int, ...]
    """[num_seqs + 1]"""
    context_lens: tuple[int, ...]
    """[num_seqs] tokens, this step's included."""
    block_tables: torch.Tensor
    """int64 [num_seqs, max_blocks]; entries past a sequence's length are 0."""
    kv_slots: torch.Tensor
    """int64 [num_tokens]: block * block_size + offset, where each token's key and value are written."""


class SliceWeights(NamedTuple):
    """B of one slice of a fused layer, for ranks [rank_start, rank_end) of the layer's stacked A."""

    rank_start: int
    rank_end: int
    out_start: int
    out_end: int
    b: torch.Tensor
    """[out_end - out_start, rank_end - rank_start], scale folded in."""


class LoraTerm(NamedTuple):
    """One adapter's part at one linear layer: y[start:end, out] += (x[start:end] @ a.T)[:, ranks] @ b.T for each slice."""

    start: int
    end: int
    a: torch.Tensor
    """[sum of ranks, in_features]"""
    slices: tuple[SliceWeights, ...]


class Ops(Protocol):
    """T tokens, H hidden, Hq query heads, Hkv key/value heads, D head size. Tensors share the model's dtype unless said."""

    name: str

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + b. x [T, in], weight [out, in], bias [out] -> [T, out]"""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, accumulated in float32. [..., H] -> [..., H]"""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [T, 2 * I] -> [T, I]"""

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate halves. x [T, heads, D]; cos, sin float32 [T, D] for each token's position. -> [T, heads, D]"""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_slots: torch.Tensor) -> None:
        """k, v [T, Hkv, D] into caches [num_blocks, block_size, Hkv, D] at kv_slots. What is not finite is stored as a finite value."""

    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over each sequence's blocks, its own tokens included; `window` tokens back at most.
        -> [T, Hq, D]"""

    def lora(self, y: torch.Tensor, x: torch.Tensor, terms: Sequence[LoraTerm]) -> None:
        """Add every term to y [T, out] in place; x [T, in_features]. Rows of no term are left alone."""

    def apply_bitmask(self, logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
        """logits[rows[i], t] = -inf in place where bit t of bitmask[i] is 0.

        logits float32 [R, V]; bitmask int32 [N, ceil(V / 32)]; rows int64 [N].
        """
