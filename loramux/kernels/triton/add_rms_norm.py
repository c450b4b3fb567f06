"""residual += delta; y = residual / sqrt(mean(residual^2) + eps) * weight

The sum is rounded to the model's dtype before it is normalised, and the quotient before it is multiplied, as `reference/` does it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual [T, H] is changed in place by delta [T, H]; weight [H]. All contiguous, of one dtype. -> y [T, H]"""
    y = torch.empty_like(residual)
    _launch(y, residual, delta, None, weight, eps)
    return y


def add_rms_norm_rows(
    residual: torch.Tensor, delta: torch.Tensor | None, rows: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The same of residual[rows] + delta[rows], for rows int32 [R]; residual is left as it is. -> y [R, H]"""
    y = residual.new_empty((len(rows), residual.shape[1]))
    _launch(y, residual, delta, rows, weight, eps)
    return y


def _launch(
    y: torch.Tensor, residual: torch.Tensor, delta: torch.Tensor | None, rows: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> None:
    num_rows, width = y.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    _add_rms_norm[(num_rows,)](
        y,
        residual,
        delta,
        rows,
        weight,
        width,
        eps,
        has_delta=delta is not None,
        has_rows=rows is not None,
        block=block,
        num_warps=8 if block >= 2048 else 4,
    )


@triton.jit
def _add_rms_norm(
    y: tl.tensor,
    residual: tl.tensor,
    delta: tl.tensor,
    rows: tl.tensor,
    weight: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    has_delta: tl.constexpr,
    has_rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    out_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + out_row).to(tl.int64) if has_rows else out_row
    columns = tl.arange(0, block)
    inside = columns < width
    dtype = y.dtype.element_ty
    x = tl.load(residual + row * width + columns, mask=inside, other=0.0)
    if has_delta:
        change = tl.load(delta + row * width + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + change.to(tl.float32)).to(dtype)
        if not has_rows:
            tl.store(residual + row * width + columns, x, mask=inside)
    normed = rms_normed(x, width, eps).to(dtype).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + out_row * width + columns, (normed * scale).to(dtype), mask=inside)


@triton.jit
def rms_normed(x: tl.tensor, width: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """x [block] with zeros past its width -> float32 [block]"""
    wide = x.to(tl.float32)
    return wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide) / width + eps))
