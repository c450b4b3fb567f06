"""The decoder: token ids and KV blocks in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from loramux.adapters.tensor_names import EMBEDDING
from loramux.adapters.types import ModuleShape
from loramux.engine.model.config import ModelConfig
from loramux.engine.model.rope import RopeFrequencies, rope_table
from loramux.kernels.ops import AttentionBatch, LoraPlan, LoraShape, Ops, SiteShape
from loramux.lora.types import LoraSite, LoraSlice

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, block_size, Hkv, D]."""


class StepLora(NamedTuple):
    """What adapters change in one forward pass."""

    rows: LoraPlan
    """Of the batch's tokens."""
    logit_rows: LoraPlan
    """Of the rows whose logits are computed."""


@dataclass(frozen=True)
class Linear:
    """A linear layer, fused where the checkpoint's modules read the same input."""

    site: LoraSite
    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, lora: LoraPlan | None, ops: Ops) -> torch.Tensor:
        y = ops.linear(x, self.weight, self.bias)
        if lora is not None:
            lora.apply(self.site.number, y, x)
        return y


class _Module(NamedTuple):
    """A canonical module: its rows of a linear layer's weight."""

    linear: Linear
    part: LoraSlice

    @property
    def shape(self) -> ModuleShape:
        return ModuleShape(self.linear.site.in_features, self.part.out_end - self.part.out_start, has_bias=self.linear.bias is not None)

    @property
    def weight(self) -> torch.Tensor:
        return self.linear.weight[self.part.out_start : self.part.out_end]

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self.linear.bias is None else self.linear.bias[self.part.out_start : self.part.out_end]


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
    lora: LoraPlan | None


class DecoderModel:
    """Llama, Mistral, Qwen2 and Qwen3, by configuration. Made by `load.load_model`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        lm_head: Linear,
        rope: RopeFrequencies,
        ops: Ops,
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        linears = [*(linear for layer in layers for linear in layer.linears), lm_head]
        self.sites: tuple[LoraSite, ...] = tuple(linear.site for linear in linears)
        self._module_of = {part.module: _Module(linear, part) for linear in linears for part in linear.site.slices}
        self.modules: dict[str, ModuleShape] = {name: module.shape for name, module in self._module_of.items()}
        self.modules[EMBEDDING] = ModuleShape(config.vocab_size, config.hidden_size, kind="embedding")
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._lm_head = lm_head
        self._rope = rope
        self._ops = ops

    @property
    def lora_shape(self) -> LoraShape:
        sites = tuple(SiteShape(site.in_features, tuple((part.out_start, part.out_end) for part in site.slices)) for site in self.sites)
        return LoraShape(sites, self.config.vocab_size, self.config.hidden_size, self.dtype)

    def module_weight(self, module: str) -> torch.Tensor:
        """[out_features, in_features] of a linear module; [vocab, hidden] of the embedding. Not a copy."""
        return self._embedding if module == EMBEDDING else self._module_of[module].weight

    def module_bias(self, module: str) -> torch.Tensor | None:
        """[out_features]; not a copy."""
        return None if module == EMBEDDING else self._module_of[module].bias

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
        lora: StepLora | None,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run T tokens and write their keys and values into `kv`.

        token_ids, positions int64 [T]; logit_rows int64 [R], rows of the batch. -> logits float32 [R, vocab_size]
        """
        rows, of_logits = lora or (None, None)
        step = Step(*rope_table(self._rope, positions), attention, rows)
        x = F.embedding(token_ids, self._embedding)
        if rows is not None:
            rows.embed(x, token_ids)
        for layer, cache in zip(self._layers, kv, strict=True):
            x = x + self._attend(layer, self._normed(x, layer.input_norm), cache, step)
            x = x + self._feed_forward(layer, self._normed(x, layer.post_attention_norm), step)
        return self._lm_head(self._normed(x[logit_rows], self._norm), of_logits, self._ops).float()

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
