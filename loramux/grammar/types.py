"""Values and interfaces of constraints. A `Constraint` crosses the process boundary; the rest lives in the engine process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    import torch


class Constraint(msgspec.Struct, frozen=True):
    """What a completion must match. `text` is a JSON Schema, a regular expression, a JSON array of strings, or EBNF, by `kind`;
    it is empty for `json_object`."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    text: str = ""


class KeywordRefusal(msgspec.Struct, frozen=True):
    """A keyword of a schema that no backend enforces where it stands."""

    pointer: str
    """JSON pointer into the schema, to the keyword itself."""
    keyword: str
    reason: str


class Matcher(Protocol):
    """The state of one sequence in a grammar. Not thread-safe; one call at a time."""

    @property
    def ended(self) -> bool:
        """True when nothing but the end of the sequence may follow."""

    def accept(self, token_id: int) -> None:
        """Advance by one token. Raises `EngineFailed` if the grammar does not allow it, `GrammarTooComplex`
        once a call of this matcher, this one or an earlier one, has taken too long."""

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        """Write the allowed next tokens into `bitmask[row]`: int32 [rows, ceil(vocab/32)], bit i of word i//32 set if allowed.

        Columns past the tokenizer's vocabulary and special tokens that are no end-of-sequence are never allowed.
        """


class CompiledGrammar(Protocol):
    """A grammar ready for one tokenizer; shared by any number of sequences."""

    num_bytes: int

    def new_matcher(self) -> Matcher: ...


class GrammarService(Protocol):
    """Compiles constraints off the engine's step; single-flight and cached by (salt, constraint, tokenizer)."""

    def compile(self, salt: bytes, constraint: Constraint) -> Future[CompiledGrammar]:
        """The future raises `UnsupportedSchema` (details.keywords), `InvalidRequest` or `GrammarTooComplex`."""

    def close(self) -> None: ...
