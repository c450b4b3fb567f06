"""x * cos + rotate_half(x) * sin, where rotate_half([a, b]) = [-b, a]."""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D]; cos, sin float32 [T, D] for each token's position. Computed in float32. -> [T, heads, D] in x's dtype"""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (wide * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)).to(x.dtype)
