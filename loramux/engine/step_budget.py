"""How many tokens a step may compute, so that prompts don't stall the streams that wait for their next token.

A step's time is measured at start, on this machine, for a few numbers of tokens (`PROBED_TOKENS`). While nobody is decoding a step takes
the whole budget. Otherwise it takes as many tokens as keep it within `MAX_STRETCH` times what the decodes alone would take, and a block's
worth of a prompt at least, so that prompts always get on.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from loramux.engine.prefix import BLOCK_SIZE

MAX_STRETCH = 2.5
PROBED_TOKENS = (1, 16, 64, 256)


class StepBudget:
    """Tokens of a step by how many sequences decode in it."""

    def __init__(self, max_num_tokens: int, seconds: Mapping[int, float] | None = None) -> None:
        """`seconds` is the measured time of a step by its number of tokens, at least two of them; None: the budget is always the whole."""
        self._max_num_tokens = max_num_tokens
        if seconds is None:
            self._sizes = None
            return
        if len(seconds) < 2:
            raise ValueError("a step's time must be known for two numbers of tokens at least")
        times = _times(max_num_tokens, seconds)
        self._sizes = np.searchsorted(times, MAX_STRETCH * times, side="right") - 1
        """The largest step within the stretch, by the number of decodes alone."""

    def of_step(self, num_decodes: int) -> int:
        """Tokens for a step in which so many sequences decode."""
        if self._sizes is None or num_decodes == 0:
            return self._max_num_tokens
        stretched = int(self._sizes[min(num_decodes, self._max_num_tokens)])
        return min(max(stretched, num_decodes + BLOCK_SIZE), self._max_num_tokens)


def _times(max_num_tokens: int, seconds: Mapping[int, float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """-> [max_num_tokens + 1]: of each number of tokens, never falling; past the largest measured, on the line of the last two."""
    sizes = sorted(seconds)
    rising = list(accumulate((seconds[size] for size in sizes), max))
    slope = (rising[-1] - rising[-2]) / (sizes[-1] - sizes[-2])
    end = max(max_num_tokens, sizes[-1])
    return np.interp(np.arange(max_num_tokens + 1), [*sizes, end + 1], [*rising, rising[-1] + slope * (end + 1 - sizes[-1])])
