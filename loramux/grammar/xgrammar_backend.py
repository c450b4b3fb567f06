"""xgrammar as a backend: compiling EBNF, and matching tokens with what was compiled."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from loramux.errors import EngineFailed, GrammarTooComplex, InvalidRequest
from loramux.grammar.vocabulary import Vocabulary
from loramux.grammar.xgrammar_core import core

if TYPE_CHECKING:
    import torch

Words = np.ndarray[Any, np.dtype[np.int32]]
_SOURCE_PLACE = re.compile(r"^.*?\.(?:cc|h):\d+: ")
MAX_CALL_S = 0.5
"""CPU time of one call of a matcher after which its request is failed: every other one waits for it."""
MAX_MEAN_CALL_S = 0.1
MIN_SPENT_S = 2.0
"""CPU time of a matcher's calls together before their mean is looked at."""
_RAW = 0
"""xgrammar's vocabulary type for tokens given as their bytes."""


class Compiler:
    """Compiles EBNF for one vocabulary; nothing is cached, one thread, which holds no lock of Python's while it works."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.token_bytes
        # Tokens of no bytes are special to xgrammar: never allowed, never accepted, unless they end the sequence.
        info = core.TokenizerInfo(list(tokens), _RAW, len(tokens), list(vocabulary.eos_token_ids), False)
        self._compiler = core.GrammarCompiler(info, 1, False, -1, False)
        self._legal = _bits(len(tokens), [token_id for token_id, token in enumerate(tokens) if token])
        self._ends = _bits(len(tokens), list(vocabulary.eos_token_ids))

    def compile(self, grammar: str) -> XgrammarGrammar:
        """Raises `InvalidRequest` with the first line of what xgrammar says, `GrammarTooComplex` when out of memory."""
        try:
            compiled = self._compiler.compile_grammar_from_strings(grammar, "root")
        except (RuntimeError, ValueError, TypeError) as error:
            if "bad_alloc" in str(error):
                raise GrammarTooComplex("compiling the grammar needs too much memory") from None
            raise InvalidRequest(f"the grammar can't be compiled: {_first_line(error)}") from None
        return XgrammarGrammar(compiled, self._legal, self._ends, len(grammar) + int(compiled.memory_size_bytes()))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no reason given"]
    return _SOURCE_PLACE.sub("", lines[0])


def _bits(vocab_size: int, token_ids: list[int]) -> Words:
    """Int32 [ceil(vocab_size / 32)], bit i of word i // 32 set for the ids given."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[token_ids] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


class XgrammarGrammar:
    """Implements `CompiledGrammar`."""

    def __init__(self, compiled: Any, legal: Words, ends: Words, num_bytes: int) -> None:
        self._compiled = compiled
        self._legal = legal
        self._ends = ends
        self.num_bytes = num_bytes

    def new_matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(core.GrammarMatcher(self._compiled, None, False, -1, None), self._legal, self._ends)


class XgrammarMatcher:
    """Implements `Matcher`. The mask of the next token is computed once, when `ended` or `fill` first needs it.

    A worker has vetted the grammar, but can't have tried every text: calls are timed, and once they have taken too long `accept`
    raises, so that a grammar stalls the engine once at most.
    """

    def __init__(self, handle: Any, legal: Words, ends: Words) -> None:
        self._handle = handle
        self._legal = legal
        self._ends = ends
        self._mask: Words | None = None
        self._num_calls = 0
        self._spent_s = 0.0
        self._slowest_s = 0.0

    @property
    def ended(self) -> bool:
        if not self._handle.is_completed():
            return False
        return not bool((self.next_mask() & ~self._ends).any())

    def accept(self, token_id: int) -> None:
        self._check_time()
        started = time.thread_time()
        is_allowed = self._handle.accept_token(token_id, False)
        self._count(started)
        if not is_allowed:
            raise EngineFailed(f"token {token_id} is not allowed by the grammar")
        self._mask = None
        self._check_time()

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        if bitmask.shape[1] != len(self._legal):
            raise EngineFailed(f"the bitmask has {bitmask.shape[1]} words, the vocabulary needs {len(self._legal)}")
        bitmask.numpy()[row] = self.next_mask()

    def next_mask(self) -> Words:
        """Int32 [ceil(vocab / 32)], bit i of word i // 32 set if token i is allowed; not to be written to."""
        if self._mask is None:
            started = time.thread_time()
            self._mask = self._compute_mask()
            self._count(started)
        return self._mask

    def _count(self, started: float) -> None:
        took_s = time.thread_time() - started
        self._num_calls += 1
        self._spent_s += took_s
        self._slowest_s = max(self._slowest_s, took_s)

    def _check_time(self) -> None:
        is_slow = self._spent_s > MIN_SPENT_S and self._spent_s > self._num_calls * MAX_MEAN_CALL_S
        if is_slow or self._slowest_s > MAX_CALL_S:
            raise GrammarTooComplex("matching the grammar takes too much time")

    def _compute_mask(self) -> Words:
        if self._handle.is_terminated():
            return self._ends
        mask = np.empty((1, len(self._legal)), dtype=np.int32)
        self._handle.fill_next_token_bitmask(mask, 0, False)
        allowed = self._legal | self._ends if self._handle.is_completed() else self._legal
        masked: Words = mask[0] & allowed
        return masked
