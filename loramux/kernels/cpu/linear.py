"""`reference/linear.py`, in the orientation that MKL multiplies faster."""

from __future__ import annotations

import torch

from loramux.kernels.reference.linear import linear as reference_linear

_FEW_ROWS = range(2, 65)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in], weight [out, in], bias [out] -> [T, out], contiguous.

    A few rows in float32 go faster with the weight on the left. All layers of a 135M model, F.linear against this, on two AVX2 cores:
    2 rows 129 and 51 ms, 16 rows 169 and 106, 64 rows 326 and 240, 512 rows 1,562 and 1,812.
    """
    if x.dtype != torch.float32 or len(x) not in _FEW_ROWS:
        return reference_linear(x, weight, bias)
    y = (weight @ x.T).T.contiguous()
    return y if bias is None else y.add_(bias)
