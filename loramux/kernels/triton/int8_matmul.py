"""y = x (values * scales)^T + b for a weight in 8 bits (`reference/quantization.py`).

Few rows read the 8-bit values themselves, half the bytes, which is what such a product waits for; for many rows the weight is widened
first and the product is cuBLAS's. Values are exact in 16 bits; sums are float32 and are scaled once, before they are rounded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from loramux.kernels.reference.quantization import QuantizedWeight
from loramux.kernels.triton.tiles import INTERPRETED

MAX_ROWS = 64
"""Up to here the product waits for the weight."""

BLOCK_INNER = 128


def int8_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in], contiguous, in the model's dtype; bias [out] -> [T, out]"""
    if len(x) > MAX_ROWS:
        return F.linear(x, weight.dequantize(x.dtype), bias)
    return int8_matmul(x, weight, bias)


def int8_matmul(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same for T of at most `MAX_ROWS`."""
    (num_rows, in_features), out_features = x.shape, len(weight.values)
    y = x.new_empty((num_rows, out_features))
    if num_rows == 0:
        return y
    block_columns = 32 if out_features <= 8192 else 64
    _int8_matmul[(triton.cdiv(out_features, block_columns),)](
        y,
        x,
        weight.values,
        weight.scales,
        bias,
        num_rows,
        in_features,
        out_features,
        has_bias=bias is not None,
        block_rows=max(16, triton.next_power_of_2(num_rows)),
        block_columns=block_columns,
        block_inner=BLOCK_INNER,
        widen=INTERPRETED,
        num_warps=4,
        num_stages=3 if x.dtype.itemsize == 2 else 2,
    )
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _int8_matmul(
    y: tl.tensor,
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    in_features: tl.tensor,
    out_features: tl.tensor,
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    widen: tl.constexpr,
) -> None:
    rows, inner = tl.arange(0, block_rows), tl.arange(0, block_inner)
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    present, inside = rows < num_rows, columns < out_features
    of_columns = values + columns.to(tl.int64)[None, :] * in_features
    sums = tl.full((block_rows, block_columns), 0.0, tl.float32)
    for first in range(0, in_features, block_inner):
        at = first + inner
        exist = at < in_features
        x_tile = tl.load(x + rows[:, None] * in_features + at[None, :], mask=present[:, None] & exist[None, :], other=0.0)
        weights = tl.load(of_columns + at[:, None], mask=exist[:, None] & inside[None, :], other=0)
        if widen:
            x_tile = x_tile.to(tl.float32)
        sums = tl.dot(x_tile, weights.to(x_tile.dtype), sums, input_precision="ieee")
    sums = sums * tl.load(scales + columns, mask=inside, other=0.0)[None, :]
    if has_bias:
        sums = sums + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    places = rows[:, None] * out_features + columns[None, :]
    tl.store(y + places, sums.to(y.dtype.element_ty), mask=present[:, None] & inside[None, :])
