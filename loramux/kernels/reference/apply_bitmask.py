"""logits[rows[i], t] = -inf where bit t of bitmask[i] is 0."""

from __future__ import annotations

import torch


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """In place. logits float32 [R, V]; bitmask int32 [N, ceil(V / 32)], bit t % 32 of word t // 32; rows int64 [N], distinct."""
    bitmask, rows = bitmask.to(logits.device), rows.to(logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask.unsqueeze(-1) >> shifts).bitwise_and(1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
