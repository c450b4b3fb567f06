"""How many tokens a step may compute, so that prompts don't stall the streams that wait for their next token.

A step's time is measured at start, on this machine, for a few numbers of tokens (`PROBED_TOKENS`), and once more after a context. While
nobody is decoding a step takes the whole budget. Otherwise it takes as many tokens as keep it within `MAX_STRETCH` times what the decodes
alone would take, and a block's worth of a prompt at least, so that prompts always get on. A prompt's token counts for more the more tokens
are before it, since it attends to them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from loramux.engine.prefix import BLOCK_SIZE

MAX_STRETCH = 2.5
PROBED_TOKENS = (1, 16, 64, 256)
PROBED_CHUNK, PROBED_CONTEXT = 64, 2048


class StepTimes(NamedTuple):
    """Measured steps."""

    seconds: Mapping[int, float]
    """By the number of tokens, of at least two of them; no context before them."""
    chunk_after_context_s: float
    """Of PROBED_CHUNK tokens after PROBED_CONTEXT others."""


class Allowance(NamedTuple):
    """What one step may compute."""

    num_tokens: int
    """Without a context before them."""
    tokens_per_key: float
    """How much of a token's time it takes to attend to one token before it."""

    def cost(self, num_tokens: int, num_before: int) -> int:
        """Of a chunk after so many tokens, of `num_tokens`."""
        return math.ceil(num_tokens * self._weight(num_before))

    def affords(self, num_left: int, num_before: int) -> int:
        """The largest chunk after so many tokens for what is left of `num_tokens`: one token at least unless nothing is left."""
        return max(1, int(num_left / self._weight(num_before))) if num_left > 0 else 0

    def _weight(self, num_before: int) -> float:
        return 1 + self.tokens_per_key * num_before


class StepBudget:
    """What steps may compute, by how many sequences decode in them."""

    def __init__(self, max_num_tokens: int, times: StepTimes | None = None) -> None:
        """None: the budget is always the whole."""
        self._whole = Allowance(max_num_tokens, 0.0)
        self._sizes: list[int] | None = None
        if times is not None:
            if len(times.seconds) < 2:
                raise ValueError("a step's time must be known for two numbers of tokens at least")
            seconds = _seconds(max_num_tokens, times.seconds)
            self._sizes = (np.searchsorted(seconds, MAX_STRETCH * seconds, side="right") - 1).tolist()
            """The largest step within the stretch, by the number of decodes alone."""
            self._tokens_per_key = _tokens_per_key(times)

    def of_step(self, num_decodes: int) -> Allowance:
        """For a step in which so many sequences decode."""
        if self._sizes is None or num_decodes == 0:
            return self._whole
        most = self._whole.num_tokens
        stretched = self._sizes[min(num_decodes, most)]
        return Allowance(min(max(stretched, num_decodes + BLOCK_SIZE), most), self._tokens_per_key)


def _seconds(max_num_tokens: int, seconds: Mapping[int, float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """-> [max_num_tokens + 1]: of each number of tokens, never falling; past the largest measured, on the line of the last two."""
    sizes = sorted(seconds)
    rising = list(accumulate((seconds[size] for size in sizes), max))
    end = max(max_num_tokens, sizes[-1]) + 1
    times = [*rising, rising[-1] + _slope(seconds) * (end - sizes[-1])]
    return np.interp(np.arange(max_num_tokens + 1), [*sizes, end], times)


def _slope(seconds: Mapping[int, float]) -> float:
    """Of a token more, between the two largest steps."""
    *_, smaller, larger = sorted(seconds)
    return max(0.0, seconds[larger] - seconds[smaller]) / (larger - smaller)


def _tokens_per_key(times: StepTimes) -> float:
    alone = times.seconds.get(PROBED_CHUNK)
    slope = _slope(times.seconds)
    if alone is None or slope == 0:
        return 0.0
    return max(0.0, times.chunk_after_context_s - alone) / (PROBED_CHUNK * PROBED_CONTEXT) / slope
