"""Weights in 8 bits, one scale a row: rounding a row to 255 steps around zero, with no calibration."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from loramux.kernels.ops import DecoderWeights, LayerWeights, LinearWeights

_HIGHEST = 127


class QuantizedWeight(NamedTuple):
    values: torch.Tensor
    """int8 [out, in]"""
    scales: torch.Tensor
    """float32 [out]"""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in]"""
        return (self.values * self.scales[:, None]).to(dtype)


def quantize(weight: torch.Tensor) -> QuantizedWeight:
    """Of a weight [out, in]: the nearest values * scales, the largest of each row exact."""
    wide = weight.float()
    scales = wide.abs().amax(1) / _HIGHEST
    steps = wide / torch.where(scales > 0, scales, 1)[:, None]
    return QuantizedWeight(steps.round().clamp(-_HIGHEST, _HIGHEST).to(torch.int8), scales)


def fake_quantized(weights: DecoderWeights) -> DecoderWeights:
    """The same weights after quantising and back, norms and biases as they are. A tied head stays tied."""
    embedding = _rounded(weights.embedding)
    head = LinearWeights(embedding, weights.head.bias) if weights.head.weight is weights.embedding else _linear(weights.head)
    return dataclasses.replace(weights, embedding=embedding, layers=map(_layer, weights.layers), head=head)


def _layer(layer: LayerWeights) -> LayerWeights:
    qkv, o, gate_up, down = (_linear(linear) for linear in layer.linears)
    return layer._replace(qkv=qkv, o=o, gate_up=gate_up, down=down)


def _linear(linear: LinearWeights) -> LinearWeights:
    return linear._replace(weight=_rounded(linear.weight))


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    return quantize(weight).dequantize(weight.dtype)
