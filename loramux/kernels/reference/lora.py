"""y' = gain * y + (x A^T)[:, ranks] B + shift, for every adapter's rows and every slice of a fused layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loramux.kernels.ops import AdapterWeights, EmbeddingWeights, SiteWeights, SlotRows


def lora(y: torch.Tensor, x: torch.Tensor, weights: SiteWeights) -> None:
    """Change y [T, out] in place; x [T, in_features]. Computed in float32, rounded once."""
    shrunk = x.float() @ weights.a.float().t()
    for part in weights.slices:
        _change(y[:, part.out_start : part.out_end], shrunk[:, part.rank_start : part.rank_end] @ part.b.float(), part.gain, part.shift)


def lora_embedding(y: torch.Tensor, token_ids: torch.Tensor, weights: EmbeddingWeights) -> None:
    """Change embeddings y [T, hidden] in place; token_ids int64 [T]. Computed in float32, rounded once."""
    _change(y, weights.a[token_ids].float() @ weights.b.float(), weights.gain, None)


def _change(y: torch.Tensor, delta: torch.Tensor, gain: torch.Tensor | None, shift: torch.Tensor | None) -> None:
    base = y.float() if gain is None else y.float() * gain
    y.copy_(base + delta if shift is None else base + delta + shift)


class ReferenceLoraPlan:
    """Implements `kernels.ops.LoraPlan`."""

    def __init__(self, rows: Sequence[SlotRows]) -> None:
        self._rows = tuple(rows)

    def apply(self, site: int, y: torch.Tensor, x: torch.Tensor) -> None:
        for start, end, _, _, weights in self._rows:
            at_site = weights.sites[site]
            if at_site is not None:
                lora(y[start:end], x[start:end], at_site)

    def embed(self, y: torch.Tensor, token_ids: torch.Tensor) -> None:
        for start, end, _, _, weights in self._rows:
            if weights.embedding is not None:
                lora_embedding(y[start:end], token_ids[start:end], weights.embedding)


class ReferenceLoraSlots:
    """Implements `kernels.ops.LoraSlots`: a slot refers to the weights where they are."""

    num_pages: int | None = None

    def prepare(self, weights: AdapterWeights) -> AdapterWeights:
        return weights

    def num_pages_of(self, weights: AdapterWeights) -> int:
        return 0

    def plan(self, rows: Sequence[SlotRows]) -> ReferenceLoraPlan:
        return ReferenceLoraPlan(rows)
