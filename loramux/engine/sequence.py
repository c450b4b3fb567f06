"""The state of a request and of its choices inside the engine. Only the scheduler changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from loramux.engine.prefix import BLOCK_SIZE, block_key
from loramux.engine.types import GenerationRequest, TokenLogprob
from loramux.grammar.types import CompiledGrammar, Matcher
from loramux.lora.types import HostAdapter

if TYPE_CHECKING:
    from loramux.engine.detokenize import TextPiece


_FEW_BLOCKS = 8


class BlockTable:
    """The blocks that a sequence holds, in order: as a list for the pool, as an array for the runner."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._array = np.zeros(_FEW_BLOCKS, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def array(self) -> NDArray[np.int64]:
        """[len], not a copy."""
        return self._array[: len(self.ids)]

    def extend(self, block_ids: list[int]) -> None:
        num_before, num_after = len(self.ids), len(self.ids) + len(block_ids)
        if num_after > len(self._array):
            self._array = np.concatenate((self._array, np.zeros(num_after, dtype=np.int64)))
        self._array[num_before:num_after] = block_ids
        self.ids += block_ids


class TextStream(Protocol):
    """Incremental text of one sequence; `detokenize.TextStream` is the real one."""

    def push(self, token_ids: tuple[int, ...]) -> TextPiece: ...

    def finish(self) -> str: ...

    @property
    def stop_string(self) -> str | None: ...


@dataclass(eq=False)
class Sequence:
    """One choice of a request.

    token_ids      |  prompt ............ | completion ......... |
    KV in blocks   |  num_computed_tokens ......... |
    blocks         |  block | block | block | block ... |      held, cover at least num_computed_tokens
    block_keys     |  key   | key   | key   |                  of every full block of token_ids
    """

    request: RequestState
    index: int
    text: TextStream
    token_ids: list[int]
    matcher: Matcher | None
    num_computed_tokens: int = 0
    blocks: BlockTable = field(default_factory=BlockTable)
    block_keys: list[bytes] = field(default_factory=list)
    slot: int | None = None
    """The adapter's slot while the sequence runs."""
    num_tokens_at_start: int = 0
    """How many tokens it had when it last started or resumed."""
    pages: tuple[int, ...] = ()
    """Of the slot."""
    finished: bool = False

    def __post_init__(self) -> None:
        self._extend_keys()

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self._extend_keys()

    def _extend_keys(self) -> None:
        while (end := (len(self.block_keys) + 1) * BLOCK_SIZE) <= len(self.token_ids):
            parent = self.block_keys[-1] if self.block_keys else self.request.root
            self.block_keys.append(block_key(parent, self.token_ids[end - BLOCK_SIZE : end]))

    @property
    def adapter_digest(self) -> str | None:
        return self.request.request.adapter_digest

    @property
    def has_advanced(self) -> bool:
        """Whether it has got a token since it last started or resumed."""
        return len(self.token_ids) > self.num_tokens_at_start

    @property
    def num_tokens_left(self) -> int:
        """At most so many more tokens are sampled."""
        return self.request.request.sampling.max_tokens - self.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(eq=False)
class RequestState:
    """A request whose grammar is compiled and whose adapter is in host memory."""

    request: GenerationRequest
    arrival: int
    """Order of submission."""
    adapter: HostAdapter | None
    grammar: CompiledGrammar | None
    root: bytes
    """Parent key of its first block."""
    stop_ids: frozenset[int]
    """Token ids that end a choice: end of sequence, unless ignored, and the request's own."""
    eos_ids: frozenset[int]
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """Prompt tokens that the first choice took from the cache; None until it has started."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until every prompt token has its log-probability, where asked for."""
        asked = self.request.sampling.num_prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.request.prompt_token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return sum(sequence.num_output_tokens for sequence in self.sequences)
