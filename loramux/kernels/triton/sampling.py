"""`reference/sampling.py` on CUDA: the same tokens, without a sort, and one answer from the device.

A row's tokens are kept by their logits, so that top_k and top_p are each a threshold: the largest number at or above which there are k
tokens, or a share of the weight. It is found two bits at a time, from the highest, in passes over the row. Weights are whole numbers,
which makes every sum exact in any order; their arithmetic is the reference's, step by step, without fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from loramux.kernels.ops import SamplingRow

BLOCK_TOKENS = 4096
_NUM_COLUMNS = tl.constexpr(6)
_LOWEST_KEY = tl.constexpr(-(2**31))
_LOWEST = tl.constexpr(-29.0)
_WEIGHT_SCALE = tl.constexpr(2.0**40)
_ROUND_FLOAT32 = tl.constexpr(1.5 * 2.0**23)
"""Added and taken away it leaves the nearest whole number, of two the even one."""
_ROUND_FLOAT64 = tl.constexpr(1.5 * 2.0**52)


def choose_tokens(logits: torch.Tensor, sampling: Sequence[SamplingRow]) -> list[int]:
    """logits float32 [R, V], contiguous -> [R], as `Ops.choose_tokens` says."""
    peaks, token_ids = logits.max(dim=1)
    token_ids = torch.where(peaks.isfinite(), token_ids, -1)
    drawn = [(index, row) for index, row in enumerate(sampling) if row.temperature > 0]
    if drawn:
        columns = torch.empty((len(drawn), _NUM_COLUMNS.value), dtype=torch.float64, pin_memory=logits.is_cuda)
        columns.copy_(torch.tensor([_columns(index, row) for index, row in drawn], dtype=torch.float64))
        moved = columns.to(logits.device, non_blocking=True)
        _draw[(len(drawn),)](token_ids, logits, peaks, moved, logits.shape[1], block=BLOCK_TOKENS, num_warps=16, enable_fp_fusion=False)
    chosen: list[int] = token_ids.tolist()
    return chosen


def _columns(index: int, row: SamplingRow) -> tuple[float, ...]:
    """Each is exact in float64."""
    inverse_temperature = float(np.float32(1) / np.float32(row.temperature))
    return index, row.top_k, inverse_temperature, float(np.float32(row.min_p)), row.top_p, row.noise


@triton.jit
def _draw(token_ids: tl.tensor, logits: tl.tensor, peaks: tl.tensor, rows: tl.tensor, vocab_size: tl.tensor, block: tl.constexpr) -> None:
    """token_ids int64 [R] of one row each program; rows float64 [S, 6], as `_columns` has them."""
    of_row = rows + tl.program_id(0) * _NUM_COLUMNS
    row = tl.load(of_row).to(tl.int64)
    peak = tl.load(peaks + row)
    if not (tl.abs(peak) < float("inf")):
        return
    top_k, top_p, noise = tl.load(of_row + 1).to(tl.int64), tl.load(of_row + 4), tl.load(of_row + 5)
    factor, min_p = tl.load(of_row + 2).to(tl.float32), tl.load(of_row + 3).to(tl.float32)
    logits += row * vocab_size
    lowest = tl.full((), _LOWEST_KEY, tl.int32)
    if (top_k > 0) & (top_k < vocab_size):
        lowest = _threshold(logits, vocab_size, lowest, top_k, peak, factor, min_p, True, block)
    total = _kept_weight(logits, vocab_size, lowest, peak, factor, min_p, block)
    if top_p < 1:
        wanted = tl.minimum(tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1), total)
        lowest = _threshold(logits, vocab_size, lowest, wanted, peak, factor, min_p, False, block)
        total = _kept_weight(logits, vocab_size, lowest, peak, factor, min_p, block)
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    before = tl.full((), 0, tl.int64)
    token = tl.full((), 0, tl.int64)
    for first in range(0, vocab_size, block):
        keys, weights = _weighed(logits, first, vocab_size, peak, factor, min_p, block)
        reached = before + tl.cumsum(tl.where(keys >= lowest, weights, 0), 0)
        inside = first + tl.arange(0, block) < vocab_size
        token += tl.sum(((reached <= target) & inside).to(tl.int64), 0)
        before = tl.max(reached, 0)
    tl.store(token_ids + row, token)


@triton.jit
def _threshold(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    lowest: tl.tensor,
    wanted: tl.tensor,
    peak: tl.tensor,
    factor: tl.tensor,
    min_p: tl.tensor,
    is_count: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """int32: the largest key at or above which, and not below `lowest`, there are `wanted` tokens or as much weight."""
    digits = tl.arange(0, 4)
    found = tl.full((), 0, tl.int64)
    for step in range(16):
        shift = 30 - 2 * step
        candidates = (found + (digits.to(tl.int64) << shift) + _LOWEST_KEY).to(tl.int32)
        sums = tl.full((4, block), 0, tl.int64)
        for first in range(0, vocab_size, block):
            keys, weights = _weighed(logits, first, vocab_size, peak, factor, min_p, block)
            if is_count:
                weights = (first + tl.arange(0, block) < vocab_size).to(tl.int64)
            weights = tl.where(keys >= lowest, weights, 0)
            sums += tl.where(keys[None, :] >= candidates[:, None], weights[None, :], 0)
        reached = (tl.sum(sums, 1) >= wanted) & (digits > 0)
        found += tl.sum(reached.to(tl.int64), 0) << shift
    return (found + _LOWEST_KEY).to(tl.int32)


@triton.jit
def _kept_weight(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    lowest: tl.tensor,
    peak: tl.tensor,
    factor: tl.tensor,
    min_p: tl.tensor,
    block: tl.constexpr,
) -> tl.tensor:
    """int64: the weight of every token that is not below `lowest`."""
    sums = tl.full((block,), 0, tl.int64)
    for first in range(0, vocab_size, block):
        keys, weights = _weighed(logits, first, vocab_size, peak, factor, min_p, block)
        sums += tl.where(keys >= lowest, weights, 0)
    return tl.sum(sums, 0)


@triton.jit
def _weighed(
    logits: tl.tensor,
    first: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    factor: tl.tensor,
    min_p: tl.tensor,
    block: tl.constexpr,
) -> tl.tuple:
    """Of tokens [block] from `first` on: keys int32, in the order of the logits, and weights int64, 0 past the last."""
    tokens = first + tl.arange(0, block)
    x = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    x = (x - peak) * factor
    powers = _power(tl.maximum(x, _LOWEST))
    rounded = (powers.to(tl.float64) * _WEIGHT_SCALE + _ROUND_FLOAT64) - _ROUND_FLOAT64
    return keys, tl.where((x < _LOWEST) | (powers < min_p), 0, rounded.to(tl.int64))


@triton.jit
def _power(x: tl.tensor) -> tl.tensor:
    """e^x, as the reference computes it."""
    n = (x * 1.44269504088896341 + _ROUND_FLOAT32) - _ROUND_FLOAT32
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * r) * r + r
    return (p + 1.0) * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
