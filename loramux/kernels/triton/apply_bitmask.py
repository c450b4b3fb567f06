"""logits[rows[i], t] = -inf where bit t of bitmask[i] is 0."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_TOKENS = 1024


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """In place. logits float32 [R, V], contiguous; bitmask int32 [N, ceil(V / 32)] and rows int64 [N] on the CPU, moved together."""
    num_masks, num_words = bitmask.shape
    if num_masks == 0:
        return
    packed = torch.empty(num_masks * (num_words + 1), dtype=torch.int32, pin_memory=logits.is_cuda)
    packed[:num_masks] = rows
    packed[num_masks:] = bitmask.reshape(-1)
    moved = packed.to(logits.device, non_blocking=True)
    vocab_size = logits.shape[1]
    grid = (num_masks, triton.cdiv(vocab_size, BLOCK_TOKENS))
    _apply_bitmask[grid](logits, moved[num_masks:], moved, vocab_size, num_words, block=BLOCK_TOKENS)


@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["bitmask"])
def _apply_bitmask(
    logits: tl.tensor, bitmask: tl.tensor, rows: tl.tensor, vocab_size: tl.tensor, num_words: tl.tensor, block: tl.constexpr
) -> None:
    mask_row = tl.program_id(0)
    row = tl.load(rows + mask_row).to(tl.int64)
    tokens = tl.program_id(1) * block + tl.arange(0, block)
    inside = tokens < vocab_size
    words = tl.load(bitmask + mask_row * num_words + tokens // 32, mask=inside, other=-1)
    is_allowed = ((words >> (tokens % 32)) & 1) != 0
    tl.store(logits + row * vocab_size + tokens, float("-inf"), mask=inside & (is_allowed == 0))
