"""The decoder: token ids and KV blocks in, logits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from loramux.adapters.types import ModuleShape
from loramux.engine.model.config import ModelConfig
from loramux.engine.model.rope import RopeFrequencies, rope_table
from loramux.kernels.ops import AttentionBatch, LoraTerm, Ops
from loramux.lora.types import LoraSite

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, block_size, Hkv, D]."""

LoraTerms = Mapping[str, Sequence[LoraTerm]]
"""By site name; a site without terms is absent."""


@dataclass(frozen=True)
class Linear:
    """A linear layer, fused where the checkpoint's modules read the same input."""

    site: LoraSite
    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, lora: LoraTerms, ops: Ops) -> torch.Tensor:
        y = ops.linear(x, self.weight, self.bias)
        terms = lora.get(self.site.name)
        if terms:
            ops.lora(y, x, terms)
        return y


@dataclass(frozen=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.o, self.gate_up, self.down)


@dataclass(frozen=True)
class Step:
    """What every layer of one forward pass shares."""

    cos: torch.Tensor
    """float32 [T, D]"""
    sin: torch.Tensor
    attention: AttentionBatch
    lora: LoraTerms


class DecoderModel:
    """Llama, Mistral, Qwen2 and Qwen3, by configuration. Made by `load.load_model`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        lm_head: torch.Tensor,
        rope: RopeFrequencies,
        ops: Ops,
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.sites: tuple[LoraSite, ...] = tuple(linear.site for layer in layers for linear in layer.linears)
        self.modules: dict[str, ModuleShape] = {
            part.module: ModuleShape(site.in_features, part.out_end - part.out_start) for site in self.sites for part in site.slices
        }
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._lm_head = lm_head
        self._rope = rope
        self._ops = ops

    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the caches of all layers."""
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize

    def new_kv_caches(self, num_blocks: int, block_size: int) -> list[KVCache]:
        """Caches of every layer, zeroed: attention reads past a sequence's end, masked, and must find finite numbers there."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        return [
            (torch.zeros(shape, dtype=self.dtype, device=self.device), torch.zeros(shape, dtype=self.dtype, device=self.device))
            for _ in self._layers
        ]

    @torch.no_grad()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[KVCache],
        attention: AttentionBatch,
        lora: LoraTerms,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run T tokens and write their keys and values into `kv`.

        token_ids, positions int64 [T]; logit_rows int64 [R], rows of the batch. -> logits float32 [R, vocab_size]
        """
        step = Step(*rope_table(self._rope, positions), attention, lora)
        x = F.embedding(token_ids, self._embedding)
        for layer, cache in zip(self._layers, kv, strict=True):
            x = x + self._attend(layer, self._normed(x, layer.input_norm), cache, step)
            x = x + self._feed_forward(layer, self._normed(x, layer.post_attention_norm), step)
        return self._ops.linear(self._normed(x[logit_rows], self._norm), self._lm_head, None).float()

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, weight, self.config.rms_norm_eps)

    def _attend(self, layer: Layer, x: torch.Tensor, cache: KVCache, step: Step) -> torch.Tensor:
        config, ops = self.config, self._ops
        heads = layer.qkv(x, step.lora, ops).view(len(x), -1, config.head_dim)
        q = heads[:, : config.num_heads]
        k, v = heads[:, config.num_heads :].chunk(2, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        q, k = ops.rope(q, step.cos, step.sin), ops.rope(k, step.cos, step.sin)
        ops.write_kv(k, v, *cache, step.attention.kv_slots)
        attended = ops.paged_attention(q, *cache, step.attention, config.head_dim**-0.5, config.sliding_window)
        return layer.o(attended.flatten(1), step.lora, ops)

    def _feed_forward(self, layer: Layer, x: torch.Tensor, step: Step) -> torch.Tensor:
        return layer.down(self._ops.silu_mul(layer.gate_up(x, step.lora, self._ops)), step.lora, self._ops)
