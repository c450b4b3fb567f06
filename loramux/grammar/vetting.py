"""What matching a grammar costs, found by walking it in a compile worker, where a call that never returns is killed with the job.

xgrammar's parser keeps every way in which a text may match. A grammar with too many compiles at once, and then takes longer with
each token: it must not reach the engine's loop, which waits for each.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from loramux.errors import GrammarTooComplex
from loramux.grammar.vocabulary import Vocabulary
from loramux.grammar.xgrammar_backend import XgrammarGrammar

NUM_WALKS = 3
NUM_TOKENS = 200
"""Per walk."""
MAX_WALKS_S = 0.6
"""Of CPU for all walks, after which those that have shown nothing wrong are left."""
GROWN_TOKEN_S = 0.005
"""A cost below this may grow: right recursion does, by microseconds per token."""
MAX_GROWTH = 3.0


class CostLimits(NamedTuple):
    """CPU time of accepting a token and finding the next one's mask."""

    token_s: float
    """One token in a walk may take more, as the first use of something does."""
    single_token_s: float
    may_grow: bool


OF_CLIENT_GRAMMARS = CostLimits(0.05, 0.25, may_grow=False)
OF_LOWERED = CostLimits(0.05, 0.25, may_grow=True)
"""Of what is lowered here. Strings of bounded length cost up to 1.5 ms per token with 49k tokens, arrays and objects 0.2 ms; what costs
more is an expression too long for an automaton. A machine may be four times slower."""
Lengths = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
_TOO_SLOW = "matching the grammar takes too much time: it allows one text in too many ways"


def check_cost(grammar: XgrammarGrammar, vocabulary: Vocabulary, limits: CostLimits) -> None:
    """Raises `GrammarTooComplex` where a walk of random tokens, any, short or long ones, meets slow ones or gets slower on its way."""
    lengths = np.array([len(token) for token in vocabulary.token_bytes])
    rng = np.random.default_rng(0)
    stop = time.thread_time() + MAX_WALKS_S
    for walk in range(NUM_WALKS):
        times = _walk(grammar, lengths, rng, (lengths > 0, lengths == 1, lengths > 4)[walk % 3], stop)
        if _is_slow(times, limits):
            raise GrammarTooComplex(_TOO_SLOW)


def _walk(grammar: XgrammarGrammar, lengths: Lengths, rng: np.random.Generator, preferred: Flags, stop: float) -> list[float]:
    """Seconds of CPU for the first mask, then for each token and the mask after it."""
    matcher = grammar.new_matcher()
    times: list[float] = []
    before = time.thread_time()
    for _ in range(NUM_TOKENS):
        mask = matcher.next_mask()
        times.append(time.thread_time() - before)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(lengths)].astype(bool) & (lengths > 0)
        token_ids = np.flatnonzero(allowed & preferred)
        token_ids = token_ids if len(token_ids) else np.flatnonzero(allowed)
        if not len(token_ids) or time.thread_time() > stop:
            break
        before = time.thread_time()
        matcher.accept(int(rng.choice(token_ids)))
    return times


def _is_slow(times: list[float], limits: CostLimits) -> bool:
    slowest = sorted(times)
    if slowest[-1] > limits.single_token_s or (len(times) > 1 and slowest[-2] > limits.token_s):
        return True
    quarter = len(times) // 4
    if limits.may_grow or quarter < 4:
        return False
    first, last = float(np.median(times[:quarter])), float(np.median(times[-quarter:]))
    return last > GROWN_TOKEN_S and last > MAX_GROWTH * first
