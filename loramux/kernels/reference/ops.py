"""The reference implementation of `kernels.ops.Ops` and of `LayerOps`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loramux.kernels.ops import (
    AttentionBatch,
    Decoder,
    DecoderShape,
    DecoderWeights,
    LogprobRows,
    LoraLimits,
    LoraShape,
    LoraSlots,
    Quantization,
    SamplingRow,
)
from loramux.kernels.reference.apply_bitmask import apply_bitmask
from loramux.kernels.reference.decoder import TorchDecoder
from loramux.kernels.reference.kv_cache import write_kv
from loramux.kernels.reference.linear import linear
from loramux.kernels.reference.lora import ReferenceLoraSlots
from loramux.kernels.reference.paged_attention import AttentionPlan, paged_attention, plan_attention
from loramux.kernels.reference.quantization import fake_quantized
from loramux.kernels.reference.rms_norm import rms_norm
from loramux.kernels.reference.rope import rope
from loramux.kernels.reference.sampling import choose_tokens, row_peaks, token_logprobs
from loramux.kernels.reference.silu_mul import silu_mul


class ReferenceOps:
    """Runs on any device. Keeps the attention plan of the last batch, since every layer of a step asks for the same one."""

    name = "reference"

    def __init__(self) -> None:
        self._planned: tuple[AttentionBatch, int, int | None, AttentionPlan] | None = None

    def decoder(self, shape: DecoderShape, weights: DecoderWeights, quantization: Quantization | None = None) -> Decoder:
        return TorchDecoder(shape, weights if quantization is None else fake_quantized(weights), self)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rope(x, cos, sin)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_slots: torch.Tensor) -> None:
        write_kv(k, v, k_cache, v_cache, kv_slots)

    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return paged_attention(q, k_cache, v_cache, self._plan(batch, k_cache.shape[1], window), scale)

    def lora_slots(self, shape: LoraShape, limits: LoraLimits) -> LoraSlots:
        return ReferenceLoraSlots()

    def apply_bitmask(self, logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
        apply_bitmask(logits, bitmask, rows)

    def row_peaks(self, logits: torch.Tensor) -> torch.Tensor:
        return row_peaks(logits)

    def choose_tokens(self, logits: torch.Tensor, sampling: Sequence[SamplingRow]) -> list[int]:
        return choose_tokens(logits, sampling)

    def token_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobRows:
        return token_logprobs(logits, token_ids, k)

    def _plan(self, batch: AttentionBatch, block_size: int, window: int | None) -> AttentionPlan:
        planned = self._planned
        if planned is not None and planned[0] is batch and planned[1:3] == (block_size, window):
            return planned[3]
        plan = plan_attention(batch, block_size, window)
        self._planned = (batch, block_size, window, plan)
        return plan
