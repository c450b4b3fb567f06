"""The operations on CUDA: Triton's, and the torch reference for what has no kernel."""

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
from loramux.kernels.reference.sampling import row_peaks, token_logprobs
from loramux.kernels.triton.apply_bitmask import apply_bitmask
from loramux.kernels.triton.decoder import TritonDecoder
from loramux.kernels.triton.lora import TritonLoraSlots
from loramux.kernels.triton.sampling import choose_tokens


class TritonOps:
    """On one device; interpreted Triton runs on a CPU too."""

    name = "triton"

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def decoder(self, shape: DecoderShape, weights: DecoderWeights, quantization: Quantization | None = None) -> Decoder:
        return TritonDecoder(shape, weights, quantization)

    def lora_slots(self, shape: LoraShape, limits: LoraLimits) -> LoraSlots:
        return TritonLoraSlots(shape, limits, self._device)

    def apply_bitmask(self, logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
        apply_bitmask(logits, bitmask, rows)

    def row_peaks(self, logits: torch.Tensor) -> torch.Tensor:
        return row_peaks(logits)

    def choose_tokens(self, logits: torch.Tensor, sampling: Sequence[SamplingRow]) -> list[int]:
        return choose_tokens(logits, sampling)

    def token_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobRows:
        return token_logprobs(logits, token_ids, k)
