"""What the kernels share: a slot's ranks and pages, a tile of B, and the change of a tile of y.

Kernels are interpreted where TRITON_INTERPRET is set when this package is imported, which runs them on a CPU's tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""The interpreter's dot takes bfloat16 for integers: operands are made float32 before it."""

BLOCK_RANKS = 16
"""The least that a tensor core takes; two pages."""

RANKS = tl.constexpr(8)
"""`layout.RANKS_PER_PAGE`, as kernels see it."""


@triton.jit
def rank_tile(
    pages_of_slot: tl.tensor, first: tl.tensor, num_ranks: tl.tensor, page_elements: tl.tensor, block_ranks: tl.constexpr
) -> tl.tuple:
    """Ranks [block_ranks] from `first` on, which of them the module has, and the element where each one's page begins."""
    ranks = first + tl.arange(0, block_ranks)
    exist = ranks < num_ranks
    pages = tl.load(pages_of_slot + ranks // RANKS, mask=exist, other=0)
    return ranks, exist, pages.to(tl.int64) * page_elements


@triton.jit
def b_tile(
    b: tl.tensor, ranks: tl.tensor, exist: tl.tensor, starts: tl.tensor, width: tl.tensor, columns: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """float32 [block_ranks, block_columns]; b points at the site's B in page 0."""
    rows = starts + (ranks % RANKS) * width
    return tl.load(b + rows[:, None] + columns[None, :], mask=exist[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def change_tile(
    y: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    delta: tl.tensor,
    gain: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    vector_page: tl.tensor,
) -> None:
    """y = gain * y + delta + shift, computed in float32 and rounded once; gain points at the site's vectors in the slot's page."""
    base = tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
    if vector_page >= 0:
        base = base * tl.load(gain + columns, mask=inside, other=1.0)[None, :]
        delta = delta + tl.load(gain + width + columns, mask=inside, other=0.0)[None, :]
    tl.store(y + offsets, (base + delta).to(y.dtype.element_ty), mask=mask)
