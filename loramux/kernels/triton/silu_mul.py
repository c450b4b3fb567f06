"""silu(gate) * up, silu rounded to the model's dtype before the product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_COLUMNS = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I], gate first, contiguous -> [T, I]"""
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    y = gate_up.new_empty((num_rows, width))
    if num_rows:
        _silu_mul[(num_rows, triton.cdiv(width, BLOCK_COLUMNS))](y, gate_up, width, block=BLOCK_COLUMNS)
    return y


@triton.jit
def _silu_mul(y: tl.tensor, gate_up: tl.tensor, width: tl.tensor, block: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    gate = tl.load(gate_up + 2 * row * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = y.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(y + row * width + columns, (activated * up).to(dtype), mask=inside)
