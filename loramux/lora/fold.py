"""What can be worked out of an adapter's module once, before serving: matrices, gain and shift of `kernels.ops.SliceWeights`.

PEFT's layer gives y = g * (W x + s B A x + s b_B) + c, where DoRA's g is m / ||W + s B A|| (Liu et al. 2024, "DoRA: Weight-Decomposed
Low-Rank Adaptation", equation 5) and c is the adapter's own bias or the base's b. The base's layer has computed y0 = W x + b, so
y = g * y0 + (g s B) A x + (c - g b + g s b_B).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from loramux.adapters.binding import BoundModule
from loramux.adapters.peft_tensors import AdapterTensor
from loramux.errors import AdapterInvalid
from loramux.lora.types import LoraBase

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By safetensors' spelling: what adapters are saved in."""


class Folded(NamedTuple):
    """All float32."""

    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features, rank], times scale and gain."""
    gain: torch.Tensor | None
    """[out_features]"""
    shift: torch.Tensor | None
    """[out_features]"""


def fold(module: BoundModule, base: LoraBase) -> Folded:
    """Raises `AdapterInvalid` where DoRA divides by the norm of a weight that the adapter makes zero."""
    shape = base.modules[module.module]
    a = torch.zeros(0, shape.in_features) if module.a is None else _float32(module.a)
    b = torch.zeros(shape.out_features, 0) if module.b is None else module.scale * _float32(module.b)
    gain = _gain(module, a, b, base)
    shift = _shift(module, gain, base.module_bias(module.module))
    return Folded(a, b if gain is None else gain[:, None] * b, gain, shift)


def _gain(module: BoundModule, a: torch.Tensor, scaled_b: torch.Tensor, base: LoraBase) -> torch.Tensor | None:
    """An embedding's weight is the transpose of a linear layer's, so that its norm is over the vocabulary."""
    if module.magnitude is None:
        return None
    weight = base.module_weight(module.module).to("cpu", torch.float32)
    weight = weight.t() if module.kind == "embedding" else weight
    norm: torch.Tensor = torch.linalg.vector_norm(torch.addmm(weight, scaled_b, a), dim=1)
    gain = _float32(module.magnitude).flatten() / norm
    if not bool(gain.isfinite().all()):
        raise AdapterInvalid(f"{module.module}: DoRA divides by the norm of a weight that is zero")
    return gain


def _shift(module: BoundModule, gain: torch.Tensor | None, base_bias: torch.Tensor | None) -> torch.Tensor | None:
    base = None if base_bias is None else base_bias.to("cpu", torch.float32)
    parts = []
    if module.bias is not None and base is not None:
        parts.append(_float32(module.bias) - base)
    if gain is not None and base is not None:
        parts.append(base - gain * base)
    if module.lora_bias is not None:
        parts.append(module.scale * _float32(module.lora_bias) * (1 if gain is None else gain))
    return torch.stack(parts).sum(dim=0) if parts else None


def _float32(tensor: AdapterTensor) -> torch.Tensor:
    flat = torch.frombuffer(tensor.data, dtype=DTYPES[tensor.dtype])
    return flat.to(torch.float32).view(tensor.shape)
