"""y = x W^T + b in C++, over weights packed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loramux.kernels.cpu import _native
from loramux.kernels.cpu.addresses import address, contiguous_address
from loramux.kernels.cpu.dtypes import DTYPES
from loramux.kernels.reference.quantization import quantize


@dataclass(frozen=True)
class PackedWeight:
    """W [out_features, in_features] laid out as `matmul.h` says, in its dtype or in 8 bits."""

    memory: torch.Tensor
    """uint8, 64-byte aligned."""
    out_features: int
    in_features: int
    dtype: torch.dtype
    scales: torch.Tensor | None
    """float32 [out_features], where W is in 8 bits."""
    native: _native.PackedWeight

    @classmethod
    def pack(cls, weight: torch.Tensor) -> PackedWeight:
        """Of a weight [out, in]. Raises ValueError where it is not contiguous, on the CPU, of a dtype of `DTYPES`."""
        return cls._packed(weight, weight.dtype, None)

    @classmethod
    def quantize(cls, weight: torch.Tensor) -> PackedWeight:
        """In 8 bits, as `reference/quantization.py` rounds. A weight as `pack` takes it."""
        contiguous_address(weight, weight.dtype)
        values, scales = quantize(weight)
        return cls._packed(values, weight.dtype, scales)

    @classmethod
    def _packed(cls, values: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None) -> PackedWeight:
        out_features, in_features = values.shape
        native_dtype, is_int8 = DTYPES[dtype], scales is not None
        memory = torch.empty(_native.packed_weight_bytes(out_features, in_features, native_dtype, is_int8), dtype=torch.uint8)
        values_address = contiguous_address(values, values.dtype)
        _native.pack_weight(values_address, out_features, in_features, native_dtype, is_int8, memory.data_ptr())
        native = _native.PackedWeight(
            blocks=memory.data_ptr(),
            out_features=out_features,
            in_features=in_features,
            dtype=native_dtype,
            scales=0 if scales is None else address(scales, torch.float32, (out_features,)),
        )
        return cls(memory, out_features, in_features, dtype, scales, native)

    def unpack(self) -> torch.Tensor:
        """[out, in] in its dtype, as products take it."""
        weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype)
        _native.unpack_weight(self.native, weight.data_ptr())
        return weight


def matmul(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype, isa: _native.Isa) -> torch.Tensor:
    """x [T, in] and bias [out] of the weight's dtype -> [T, out] of it or of float32, on as many threads as torch has.

    Raises ValueError for any other dtype, shape or layout.
    """
    if dtype not in (weight.dtype, torch.float32):
        raise ValueError(f"a product of {weight.dtype} in {dtype}")
    num_rows = len(x)
    address(x, weight.dtype, (num_rows, weight.in_features))
    padded = torch.nn.functional.pad(x, (0, -weight.in_features % _native.INPUT_ALIGN))
    y = torch.empty(num_rows, weight.out_features, dtype=dtype)
    _native.matmul(
        x=padded.data_ptr(),
        x_stride=padded.shape[1],
        num_rows=num_rows,
        weight=weight.native,
        bias=0 if bias is None else address(bias, weight.dtype, (weight.out_features,)),
        y=y.data_ptr(),
        y_stride=weight.out_features,
        y_is_float32=dtype == torch.float32,
        isa=isa,
        num_threads=torch.get_num_threads(),
    )
    return y
