"""A decoder's forward pass, composed of single operations in torch: the definition of `kernels.ops.Decoder`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from loramux.kernels.ops import AttentionBatch, DecoderShape, DecoderWeights, LayerWeights, LoraPlan, StepLora
from loramux.kernels.reference.kv_cache import write_kv
from loramux.kernels.reference.linear import linear
from loramux.kernels.reference.paged_attention import AttentionPlan, paged_attention, plan_attention
from loramux.kernels.reference.rms_norm import rms_norm
from loramux.kernels.reference.rope import rope
from loramux.kernels.reference.silu_mul import silu_mul

KvCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, block_size, Hkv, D]."""


@dataclass(frozen=True)
class _Step:
    """What every layer of one forward pass shares."""

    cos: torch.Tensor
    sin: torch.Tensor
    kv_slots: torch.Tensor
    attention: AttentionPlan
    lora: LoraPlan | None


class TorchDecoder:
    """Implements `kernels.ops.Decoder` on any device."""

    def __init__(self, shape: DecoderShape, weights: DecoderWeights) -> None:
        self._shape = shape
        self._embedding = weights.embedding
        self._layers = tuple(weights.layers)
        self._norm = weights.norm
        self._sites = (*(linear for layer in self._layers for linear in layer.linears), weights.head)

    def new_kv_caches(self, num_blocks: int, block_size: int) -> list[KvCache]:
        """Zeroed: attention reads past a sequence's end, masked, and must find finite numbers there."""
        size = (num_blocks, block_size, self._shape.num_kv_heads, self._shape.head_dim)
        zeros = functools.partial(torch.zeros, size, dtype=self._shape.dtype, device=self._embedding.device)
        return [(zeros(), zeros()) for _ in self._layers]

    def site_weight(self, site: int) -> torch.Tensor:
        return self._sites[site].weight

    def site_bias(self, site: int) -> torch.Tensor | None:
        return self._sites[site].bias

    def embedding_weight(self) -> torch.Tensor:
        return self._embedding

    @torch.no_grad()
    def forward(
        self,
        token_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_caches: list[KvCache],
        attention: AttentionBatch,
        lora: StepLora | None,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        rows, of_logits = lora or (None, None)
        token_ids, cos, sin, logit_rows = (each.to(self._embedding.device) for each in (token_ids, cos, sin, logit_rows))
        attention = self._moved(attention)
        plan = plan_attention(attention, kv_caches[0][0].shape[1], self._shape.sliding_window)
        step = _Step(cos, sin, attention.kv_slots, plan, rows)
        x = F.embedding(token_ids, self._embedding)
        if rows is not None:
            rows.embed(x, token_ids)
        for index, (layer, cache) in enumerate(zip(self._layers, kv_caches, strict=True)):
            x = x + self._attend(index, layer, self._normed(x, layer.input_norm), cache, step)
            x = x + self._feed_forward(index, layer, self._normed(x, layer.post_attention_norm), step)
        return self._linear(len(self._sites) - 1, self._normed(x[logit_rows], self._norm), of_logits).float()

    def _moved(self, batch: AttentionBatch) -> AttentionBatch:
        device = self._embedding.device
        return dataclasses.replace(batch, block_tables=batch.block_tables.to(device), kv_slots=batch.kv_slots.to(device))

    def _linear(self, site: int, x: torch.Tensor, lora: LoraPlan | None) -> torch.Tensor:
        y = linear(x, *self._sites[site])
        if lora is not None:
            lora.apply(site, y, x)
        return y

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._shape.rms_norm_eps)

    def _attend(self, index: int, layer: LayerWeights, x: torch.Tensor, cache: KvCache, step: _Step) -> torch.Tensor:
        site = len(layer.linears) * index
        shape = self._shape
        heads = self._linear(site, x, step.lora).view(len(x), -1, shape.head_dim)
        q = heads[:, : shape.num_heads]
        k, v = heads[:, shape.num_heads :].chunk(2, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        q, k = rope(q, step.cos, step.sin), rope(k, step.cos, step.sin)
        write_kv(k, v, *cache, step.kv_slots)
        attended = paged_attention(q, *cache, step.attention, shape.scale)
        return self._linear(site + 1, attended.flatten(1), step.lora)

    def _feed_forward(self, index: int, layer: LayerWeights, x: torch.Tensor, step: _Step) -> torch.Tensor:
        site = len(layer.linears) * index + 2
        return self._linear(site + 1, silu_mul(self._linear(site, x, step.lora)), step.lora)
