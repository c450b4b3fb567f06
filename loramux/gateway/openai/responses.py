"""What clients read: whole responses and stream chunks, as plain values ready for JSON. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from loramux.engine.types import FinishReason, RequestEnd, TokenDelta, TokenLogprob
from loramux.gateway.tokenizer import ChatTokenizer, EchoedText, TextOffset

Json = dict[str, Any]
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass
class Choice:
    """One choice so far: `add` takes each of its deltas."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: TokenDelta) -> None:
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.finish_reason else self.stop_reason


def usage(ends: Sequence[RequestEnd]) -> Json:
    """Over all prompts of a request; a prompt counts once, however many choices it has."""
    prompt = sum(end.num_prompt_tokens for end in ends)
    completion = sum(end.num_completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.num_cached_tokens for end in ends)},
    }


class Format(Protocol):
    """How one of the two APIs writes its answers."""

    def whole(self, choices: Sequence[Choice], ends: Sequence[RequestEnd]) -> Json: ...

    def opening(self, index: int) -> Json:
        """The first chunk of a choice."""

    def chunk(self, index: int, delta: TokenDelta) -> Json: ...

    def finish(self, index: int, finish_reason: str, stop_reason: str | int | None) -> Json: ...

    def usage_chunk(self, ends: Sequence[RequestEnd]) -> Json: ...


class ChatFormat:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, id: str, created: int, model: str, tokenizer: ChatTokenizer) -> None:
        self._head = {"id": f"chatcmpl-{id}", "object": "chat.completion", "created": created, "model": model}
        self._chunk_head = self._head | {"object": "chat.completion.chunk"}
        self._tokenizer = tokenizer

    def whole(self, choices: Sequence[Choice], ends: Sequence[RequestEnd]) -> Json:
        answer = {**self._head, "choices": [self._choice(choice) for choice in choices], "usage": usage(ends)}
        first = choices[0].prompt_logprobs
        return answer | ({} if first is None else {"prompt_logprobs": prompt_logprobs(first, self._tokenizer)})

    def opening(self, index: int) -> Json:
        return self._delta(index, {"role": "assistant", "content": ""})

    def chunk(self, index: int, delta: TokenDelta) -> Json:
        return self._delta(index, {"content": delta.text}, logprobs=self._logprobs(delta.logprobs))

    def finish(self, index: int, finish_reason: str, stop_reason: str | int | None) -> Json:
        return self._delta(index, {}, finish_reason=finish_reason, stop_reason=stop_reason)

    def usage_chunk(self, ends: Sequence[RequestEnd]) -> Json:
        return {**self._chunk_head, "choices": [], "usage": usage(ends)}

    def _choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _delta(self, index: int, delta: Json, *, logprobs: Json | None = None, **ending: Any) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **ending}
        return {**self._chunk_head, "choices": [choice]}

    def _logprobs(self, positions: Sequence[TokenLogprob]) -> Json | None:
        if not positions:
            return None
        return {"content": [self._position(position) for position in positions], "refusal": None}

    def _position(self, position: TokenLogprob) -> Json:
        top = [self._token(token_id, logprob) for token_id, logprob in position.top]
        return {**self._token(position.token_id, position.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}


class CompletionFormat:
    """`text_completion`. `echoes` holds one per prompt, for each of its `n` choices, or nothing."""

    def __init__(
        self, id: str, created: int, model: str, tokenizer: ChatTokenizer, *, n: int, echoes: Sequence[EchoedText], with_logprobs: bool
    ) -> None:
        self._head = {"id": f"cmpl-{id}", "object": "text_completion", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._n, self._echoes, self._with_logprobs = n, echoes, with_logprobs
        self._offsets: dict[int, TextOffset] = {}

    def whole(self, choices: Sequence[Choice], ends: Sequence[RequestEnd]) -> Json:
        shared = [choice.prompt_logprobs for choice in choices[:: self._n]]
        whole = [self._whole_choice(choice, shared[choice.index // self._n]) for choice in choices]
        return {**self._head, "choices": whole, "usage": usage(ends)}

    def opening(self, index: int) -> Json:
        return self._choice(index, self._echo(index))

    def chunk(self, index: int, delta: TokenDelta) -> Json:
        return self._choice(index, delta.text, logprobs=self._logprobs(index, delta.logprobs))

    def finish(self, index: int, finish_reason: str, stop_reason: str | int | None) -> Json:
        return self._choice(index, "", finish_reason=finish_reason, stop_reason=stop_reason)

    def usage_chunk(self, ends: Sequence[RequestEnd]) -> Json:
        return {**self._head, "choices": [], "usage": usage(ends)}

    def _whole_choice(self, choice: Choice, prompt: Sequence[TokenLogprob | None] | None) -> Json:
        echoed = [] if prompt is None or not self._echoes else list(prompt)
        written: Json = self._choice(
            choice.index,
            self._echo(choice.index) + choice.text,
            logprobs=self._logprobs(choice.index, choice.logprobs, echoed),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )["choices"][0]
        return written | ({} if prompt is None else {"prompt_logprobs": prompt_logprobs(prompt, self._tokenizer)})

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n].text if self._echoes else ""

    def _choice(self, index: int, text: str, *, logprobs: Json | None = None, **ending: Any) -> Json:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **ending}
        return {**self._head, "choices": [choice]}

    def _logprobs(self, index: int, answer: Sequence[TokenLogprob], echoed: Sequence[TokenLogprob | None] = ()) -> Json | None:
        """`echoed` is of the prompt's tokens, the first of which has no log-probability."""
        positions = [*echoed, *answer]
        if not self._with_logprobs or not positions:
            return None
        offset = self._offsets.setdefault(index, TextOffset(len(self._echo(index))))
        starts = [*self._echoes[index // self._n].starts] if echoed else []
        token_ids = [*self._echoes[index // self._n].token_ids] if echoed else []
        for position in answer:
            token_ids.append(position.token_id)
            starts.append(offset.advance(self._shown_bytes(position.token_id)))
        return {
            "tokens": [self._tokenizer.token_text(token_id) for token_id in token_ids],
            "token_logprobs": [None if position is None else max(position.logprob, LOWEST_LOGPROB) for position in positions],
            "top_logprobs": [None if position is None else self._top(position) for position in positions],
            "text_offset": starts,
        }

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer.is_special(token_id) else self._tokenizer.token_bytes(token_id)

    def _top(self, position: TokenLogprob) -> dict[str, float]:
        pairs = [*position.top, (position.token_id, position.logprob)]
        return {self._tokenizer.token_text(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in reversed(pairs)}


def prompt_logprobs(positions: Sequence[TokenLogprob | None], tokenizer: ChatTokenizer) -> list[Json | None]:
    """vLLM's form: per prompt token, a map from token id to its log-probability; null for the first token."""
    return [None if position is None else _by_token_id(position, tokenizer) for position in positions]


def _by_token_id(position: TokenLogprob, tokenizer: ChatTokenizer) -> Json:
    ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, start=1)}
    ranked[position.token_id] = (position.logprob, position.rank)
    return {
        str(token_id): {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, (logprob, rank) in ranked.items()
    }
