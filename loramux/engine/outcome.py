"""What a sampled token makes of its sequence: text that is certain, perhaps the end, and the delta that tells it."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.engine.plan import Chunk, SampledToken
from loramux.engine.sequence import Sequence
from loramux.engine.types import FinishReason, TokenDelta, TokenLogprob


@dataclass(frozen=True)
class Outcome:
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


def judge(sequence: Sequence, token_id: int, max_model_len: int) -> Outcome:
    """The text a new token makes certain, and whether the sequence ends with it. Raises `EngineFailed` for a token off the
    grammar, `GrammarTooComplex` where the grammar has become too slow."""
    state, matcher, sampling = sequence.request, sequence.matcher, sequence.request.request.sampling
    if matcher is not None:
        matcher.accept(token_id)
    if token_id in state.stop_ids or (matcher is not None and token_id in state.eos_ids):
        return Outcome(sequence.text.finish(), "stop", None if token_id in state.eos_ids else token_id)
    piece = sequence.text.push((token_id,))
    if piece.stop_string is not None:
        return Outcome(piece.text, "stop", piece.stop_string)
    if matcher is not None and matcher.ended:
        return Outcome(piece.text + sequence.text.finish(), "stop")
    if sequence.num_output_tokens >= sampling.max_tokens or len(sequence.token_ids) >= max_model_len:
        text = piece.text + sequence.text.finish()
        stop_string = sequence.text.stop_string
        return Outcome(text, "length") if stop_string is None else Outcome(text, "stop", stop_string)
    return Outcome(piece.text)


def token_delta(sequence: Sequence, sampled: SampledToken, outcome: Outcome) -> TokenDelta:
    """For a token that has been appended to the sequence."""
    state = sequence.request
    first = sequence.index == 0 and sequence.num_output_tokens == 1
    return TokenDelta(
        request_id=state.request.id,
        index=sequence.index,
        token_ids=(sampled.token_id,),
        text=outcome.text,
        logprobs=() if sampled.logprob is None else (sampled.logprob,),
        prompt_logprobs=tuple(state.prompt_logprobs) if first and state.prompt_logprobs else None,
        finish_reason=outcome.finish_reason,
        stop_reason=outcome.stop_reason,
    )


def collect_prompt_logprobs(chunk: Chunk, logprobs: list[TokenLogprob]) -> None:
    """Append what is new; a prompt computed again after a preemption repeats what is there."""
    collected = chunk.sequence.request.prompt_logprobs
    if not collected:
        collected.append(None)
    collected.extend(logprobs[len(collected) - chunk.start - 1 :])
