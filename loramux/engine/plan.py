"""What passes between scheduler and runner: the plan of a step and its result. Local to the engine process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from loramux.engine.sequence import Sequence
from loramux.engine.types import TokenLogprob
from loramux.errors import Failure


class Chunk(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence, to be computed in this step. The runner reads the sequence, never writes it."""

    sequence: Sequence
    start: int
    num_tokens: int
    mask_row: int | None
    """Row of the token bitmask that the sequence's matcher fills, where it is constrained and samples in this step."""

    @property
    def samples(self) -> bool:
        """True where the chunk reaches the sequence's last token, so that its logits give the next."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sequence.index == 0 and self.sequence.request.wants_prompt_logprobs


@dataclass(frozen=True)
class StepPlan:
    """Made by `Scheduler.schedule`, run by `ModelRunner.run`."""

    chunks: tuple[Chunk, ...]
    num_mask_rows: int

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class SampledToken(NamedTuple):
    """The sampler's answer for one row. With `error` set there is no token and the request ends in failure."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: Failure | None = None


@dataclass(frozen=True)
class StepResult:
    """Made by `ModelRunner.run`, read by `Scheduler.apply`. Both lists are aligned with the plan's chunks."""

    sampled: list[SampledToken | None]
    """None where the chunk does not sample."""
    prompt_logprobs: list[list[TokenLogprob]]
    """For prompt tokens start + 1 to start + num_tokens of the chunk, where asked for; else empty."""
