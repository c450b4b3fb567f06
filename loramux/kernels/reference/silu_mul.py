"""silu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I], gate first -> [T, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
