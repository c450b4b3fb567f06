from __future__ import annotations

import pytest
import torch

from loramux.kernels.reference.apply_bitmask import apply_bitmask as reference
from loramux.kernels.triton.apply_bitmask import BLOCK_TOKENS, apply_bitmask


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 45])
def test_it_equals_the_reference(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator)
    bitmask = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    rows, want = torch.tensor([4, 0, 2]), logits.clone()
    apply_bitmask(logits, bitmask, rows)
    reference(want, bitmask, rows)
    assert torch.equal(logits, want)


def test_no_masks_are_no_launch() -> None:
    apply_bitmask(torch.zeros(2, 40), torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
