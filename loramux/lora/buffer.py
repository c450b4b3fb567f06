"""The one piece of host memory that an adapter's matrices lie in."""

from __future__ import annotations

import mmap
from typing import NamedTuple

import torch

ALIGNMENT_BYTES = 64


class Area(NamedTuple):
    """A tensor to be."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return _aligned(torch.Size(self.shape).numel() * self.dtype.itemsize)


class HostBuffer:
    """Hands out zeroed tensors, each contiguous and aligned to 64 bytes.

    Mapped memory, not the allocator's: it goes back to the system when the last of its tensors is gone, whatever was allocated since.
    """

    def __init__(self, num_bytes: int) -> None:
        self._flat = torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)
        self._next = 0

    @property
    def num_bytes(self) -> int:
        return self._flat.nbytes

    def take(self, area: Area) -> torch.Tensor:
        start = self._next
        self._next += area.num_bytes
        num_bytes = torch.Size(area.shape).numel() * area.dtype.itemsize
        return self._flat[start : start + num_bytes].view(area.dtype).view(area.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
