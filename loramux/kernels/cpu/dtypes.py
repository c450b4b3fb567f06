"""What the native kernels compute in."""

from __future__ import annotations

import torch

from loramux.kernels.cpu import _native

DTYPES = {torch.float32: _native.Dtype.FLOAT32, torch.bfloat16: _native.Dtype.BFLOAT16}
