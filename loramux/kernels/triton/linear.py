"""A linear layer and an embedding, with their weight as it is or in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from loramux.kernels.ops import LinearWeights, Quantization
from loramux.kernels.reference.quantization import QuantizedWeight, quantize
from loramux.kernels.triton.int8_matmul import int8_linear


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b"""

    weight: torch.Tensor | QuantizedWeight
    """[out, in]"""
    bias: torch.Tensor | None
    dtype: torch.dtype

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in], contiguous -> [T, out]"""
        if isinstance(self.weight, QuantizedWeight):
            return int8_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, for an embedding: indices int32 [T] -> [T, in]"""
        if isinstance(self.weight, QuantizedWeight):
            return QuantizedWeight(*(each.index_select(0, indices) for each in self.weight)).dequantize(self.dtype)
        return F.embedding(indices, self.weight)

    def whole(self) -> torch.Tensor:
        """[out, in] in the model's dtype, as the layer computes with it. Perhaps a copy."""
        return self.weight.dequantize(self.dtype) if isinstance(self.weight, QuantizedWeight) else self.weight


def linear(weights: LinearWeights, quantization: Quantization | None) -> Linear:
    weight, bias = weights
    return Linear(weight if quantization is None else quantize(weight), bias, weight.dtype)
