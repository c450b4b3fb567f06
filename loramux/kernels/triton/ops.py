"""The operations on CUDA: a decoder and adapters in Triton, the rest the torch reference."""

from __future__ import annotations

import torch

from loramux.kernels.ops import Decoder, DecoderShape, DecoderWeights, LoraLimits, LoraShape, LoraSlots, Quantization
from loramux.kernels.reference.ops import ReferenceOps
from loramux.kernels.reference.quantization import fake_quantized
from loramux.kernels.triton.decoder import TritonDecoder
from loramux.kernels.triton.lora import TritonLoraSlots


class TritonOps(ReferenceOps):
    """On one device; interpreted Triton runs on a CPU too."""

    name = "triton"

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def decoder(self, shape: DecoderShape, weights: DecoderWeights, quantization: Quantization | None = None) -> Decoder:
        return TritonDecoder(shape, weights if quantization is None else fake_quantized(weights))

    def lora_slots(self, shape: LoraShape, limits: LoraLimits) -> LoraSlots:
        return TritonLoraSlots(shape, limits, self._device)
