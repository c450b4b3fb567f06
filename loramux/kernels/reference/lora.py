"""y[start:end, out] += (x[start:end] A^T)[:, ranks] B^T, for every adapter's rows and every slice of a fused layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loramux.kernels.ops import LoraTerm


def lora(y: torch.Tensor, x: torch.Tensor, terms: Sequence[LoraTerm]) -> None:
    """Add every term to y [T, out] in place; x [T, in_features]. Rows of no term are left alone."""
    for term in terms:
        shrunk = x[term.start : term.end] @ term.a.t()
        for part in term.slices:
            out = y[term.start : term.end, part.out_start : part.out_end]
            out.addmm_(shrunk[:, part.rank_start : part.rank_end], part.b.t())
