"""Where a tensor's elements are, once it is sure that they lie as native code expects."""

from __future__ import annotations

import torch


def address(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Raises ValueError for any other shape, and as `contiguous_address`."""
    if tensor.shape != shape:
        raise ValueError(f"a tensor of shape {list(tensor.shape)}, not {list(shape)}")
    return contiguous_address(tensor, dtype)


def contiguous_address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Raises ValueError where the tensor is not contiguous, of this dtype, on the CPU."""
    if tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        described = f"a {layout} {tensor.dtype} tensor of shape {list(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{described}, not a contiguous {dtype} tensor on the CPU")
    return tensor.data_ptr()
