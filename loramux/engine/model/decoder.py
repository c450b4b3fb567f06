"""The decoder: token ids and KV blocks in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from loramux.adapters.tensor_names import EMBEDDING
from loramux.adapters.types import ModuleShape
from loramux.engine.model.config import ModelConfig
from loramux.engine.model.rope import RopeFrequencies, rope_table
from loramux.kernels.ops import AttentionBatch, Decoder, LoraShape, SiteShape, StepLora
from loramux.lora.types import LoraSite, LoraSlice


class _Module(NamedTuple):
    """A canonical module: its rows of a linear layer's weight."""

    site: LoraSite
    part: LoraSlice
    site_bias: torch.Tensor | None

    @property
    def shape(self) -> ModuleShape:
        return ModuleShape(self.site.in_features, self.part.out_end - self.part.out_start, has_bias=self.site_bias is not None)


class DecoderModel:
    """Llama, Mistral, Qwen2 and Qwen3, by configuration. Made by `load.load_model`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        sites: Sequence[LoraSite],
        rope: RopeFrequencies,
        decoder: Decoder,
    ) -> None:
        """`sites` name the decoder's linear layers, in its order."""
        self.config = config
        self.dtype = dtype
        self.sites = tuple(sites)
        self._module_of = {part.module: _Module(site, part, decoder.site_bias(site.number)) for site in sites for part in site.slices}
        self.modules: dict[str, ModuleShape] = {name: module.shape for name, module in self._module_of.items()}
        self.modules[EMBEDDING] = ModuleShape(config.vocab_size, config.hidden_size, kind="embedding")
        self._rope = rope
        self._decoder = decoder

    @property
    def lora_shape(self) -> LoraShape:
        sites = tuple(SiteShape(site.in_features, tuple((part.out_start, part.out_end) for part in site.slices)) for site in self.sites)
        return LoraShape(sites, self.config.vocab_size, self.config.hidden_size, self.dtype)

    def module_weight(self, module: str) -> torch.Tensor:
        """[out_features, in_features] of a linear module; [vocab, hidden] of the embedding. Perhaps a copy."""
        if module == EMBEDDING:
            return self._decoder.embedding_weight()
        site, part, _ = self._module_of[module]
        return self._decoder.site_weight(site.number)[part.out_start : part.out_end]

    def module_bias(self, module: str) -> torch.Tensor | None:
        """[out_features]; not a copy."""
        if module == EMBEDDING:
            return None
        _, part, bias = self._module_of[module]
        return None if bias is None else bias[part.out_start : part.out_end]

    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the caches of all layers."""
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize

    def new_kv_caches(self, num_blocks: int, block_size: int) -> Any:
        """Of every layer, for `forward`."""
        return self._decoder.new_kv_caches(num_blocks, block_size)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Any,
        attention: AttentionBatch,
        lora: StepLora | None,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run T tokens and write their keys and values into `kv`.

        token_ids, positions int64 [T]; logit_rows int64 [R], rows of the batch; these and `attention` on the CPU, whichever the device.
        -> logits float32 [R, vocab_size] on the device, the caller's until the next forward.
        """
        return self._decoder.forward(token_ids, *rope_table(self._rope, positions), kv, attention, lora, logit_rows)
