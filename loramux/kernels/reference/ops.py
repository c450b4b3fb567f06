"""The reference implementation of `kernels.ops.Ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loramux.kernels.ops import (
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
from loramux.kernels.reference.lora import ReferenceLoraSlots
from loramux.kernels.reference.quantization import fake_quantized
from loramux.kernels.reference.sampling import choose_tokens, row_peaks, token_logprobs


class ReferenceOps:
    """Runs on any device."""

    name = "reference"

    def decoder(self, shape: DecoderShape, weights: DecoderWeights, quantization: Quantization | None = None) -> Decoder:
        return TorchDecoder(shape, weights if quantization is None else fake_quantized(weights))

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
