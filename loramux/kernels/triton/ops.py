"""The operations on CUDA: adapters in Triton, the rest the torch reference."""

from __future__ import annotations

import torch

from loramux.kernels.ops import LoraLimits, LoraShape, LoraSlots
from loramux.kernels.reference.ops import ReferenceOps
from loramux.kernels.triton.lora import TritonLoraSlots


class TritonOps(ReferenceOps):
    """On one device; interpreted Triton runs on a CPU too."""

    name = "triton"

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def lora_slots(self, shape: LoraShape, limits: LoraLimits) -> LoraSlots:
        return TritonLoraSlots(shape, limits, self._device)
