"""xgrammar as a backend: compiling EBNF, and matching tokens with what was compiled."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from loramux.errors import EngineFailed, GrammarTooComplex, InvalidRequest
from loramux.grammar.vocabulary import Vocabulary
from loramux.grammar.xgrammar_core import core

if TYPE_CHECKING:
    import torch

Words = np.ndarray[Any, np.dtype[np.int32]]
_SOURCE_PLACE = re.compile(r"^.*?\.(?:cc|h):\d+: ")
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
    """Implements `Matcher`. The mask of the next token is computed once, when `ended` or `fill` first needs it."""

    def __init__(self, handle: Any, legal: Words, ends: Words) -> None:
        self._handle = handle
        self._legal = legal
        self._ends = ends
        self._mask: Words | None = None

    @property
    def ended(self) -> bool:
        if not self._handle.is_completed():
            return False
        return not bool((self._next_mask() & ~self._ends).any())

    def accept(self, token_id: int) -> None:
        if not self._handle.accept_token(token_id, False):
            raise EngineFailed(f"token {token_id} is not allowed by the grammar")
        self._mask = None

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        if bitmask.shape[1] != len(self._legal):
            raise EngineFailed(f"the bitmask has {bitmask.shape[1]} words, the vocabulary needs {len(self._legal)}")
        bitmask.numpy()[row] = self._next_mask()

    def _next_mask(self) -> Words:
        if self._mask is None:
            self._mask = self._compute_mask()
        return self._mask

    def _compute_mask(self) -> Words:
        if self._handle.is_terminated():
            return self._ends
        mask = np.empty((1, len(self._legal)), dtype=np.int32)
        self._handle.fill_next_token_bitmask(mask, 0, False)
        allowed = self._legal | self._ends if self._handle.is_completed() else self._legal
        masked: Words = mask[0] & allowed
        return masked
