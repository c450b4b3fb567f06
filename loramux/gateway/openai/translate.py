"""From a wire model to the engine's request: pure functions, no I/O. Every refusal names its parameter by JSON pointer."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pydantic_core

from loramux.adapters.types import BaseDescription
from loramux.engine.types import GenerationRequest, SamplingParams
from loramux.errors import ContextLengthExceeded, GrammarTooComplex, InvalidRequest, LoramuxError, UnsupportedParameter, UnsupportedSchema
from loramux.gateway.openai.wire import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    GenerationBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    StructuredOutputs,
)
from loramux.gateway.tenancy.types import Principal
from loramux.grammar.limits import check_text
from loramux.grammar.types import Constraint

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default on /v1/completions; a chat may fill the context."""


class Target(NamedTuple):
    """What answers: the base, perhaps with an adapter."""

    base: BaseDescription
    max_num_seqs: int
    adapter_digest: str | None


class PlacedConstraint(NamedTuple):
    constraint: Constraint
    pointer: str
    """Where in the body it stands."""


def to_request(
    body: GenerationBody,
    prompt_token_ids: Sequence[int],
    *,
    request_id: str,
    principal: Principal,
    target: Target,
    encode: Callable[[str], list[int]],
) -> GenerationRequest:
    """One prompt of `body`. `encode` gives the ids of a text without special tokens. Raises `InvalidRequest` and its kind."""
    n = body.n or 1
    if n > target.max_num_seqs:
        raise InvalidRequest(f"at most {target.max_num_seqs} choices can run at a time", param="/n")
    placed = constraint_of(body)
    _check_prompt(prompt_token_ids, target.base, _prompt_pointer(body))
    return GenerationRequest(
        id=request_id,
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=sampling_params(body, len(prompt_token_ids), target.base, encode),
        salt=narrowed_salt(principal.salt, body.cache_salt),
        adapter_digest=target.adapter_digest,
        n=n,
        constraint=placed.constraint if placed else None,
        priority=body.priority or 0,
        weight=principal.weight,
    )


def sampling_params(
    body: GenerationBody, num_prompt_tokens: int, base: BaseDescription, encode: Callable[[str], list[int]]
) -> SamplingParams:
    max_tokens = max_tokens_of(body, num_prompt_tokens, base.max_model_len)
    top_p = _or(body.top_p, 1.0)
    stop_token_ids = tuple(body.stop_token_ids or ())
    _check_ids(stop_token_ids, base.vocab_size, "/stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**63,
        temperature=_or(body.temperature, 1.0),
        top_k=1 if top_p == 0 else max(0, min(body.top_k or 0, base.vocab_size)),
        top_p=top_p or 1.0,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, base.vocab_size),
        bad_words=bad_words_ids(body.bad_words or (), encode),
        min_tokens=_min_tokens(body.min_tokens or 0, max_tokens),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=stop_token_ids,
        ignore_eos=body.ignore_eos or False,
        num_logprobs=num_logprobs(body),
        num_prompt_logprobs=num_prompt_logprobs(body),
    )


def check_combinations(body: GenerationBody, num_prompts: int) -> None:
    """What pydantic can't say: parameters that exclude or need each other."""
    if (body.stop or body.stop_token_ids) and constraint_of(body) is not None:
        pointer = "/stop" if body.stop else "/stop_token_ids"
        raise UnsupportedParameter("a stop could cut a constrained answer short; the constraint alone ends it", param=pointer)
    if (body.n or 1) * num_prompts > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_CHOICES}", param="/n")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream", param="/stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise UnsupportedParameter("prompt_logprobs can't be streamed", param="/prompt_logprobs")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", param="/top_logprobs")
    if isinstance(body, CompletionBody) and body.stream and body.echo and body.logprobs is not None:
        raise UnsupportedParameter("echo with logprobs can't be streamed", param="/echo")


def max_tokens_of(body: GenerationBody, num_prompt_tokens: int, max_model_len: int) -> int:
    """Raises `ContextLengthExceeded`."""
    room = max_model_len - num_prompt_tokens
    asked, pointer = body.max_tokens, "/max_tokens"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        asked, pointer = body.max_completion_tokens, "/max_completion_tokens"
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens; with at least one more it exceeds this model's {max_model_len}",
            param=_prompt_pointer(body),
        )
    if asked is None:
        return min(room, COMPLETION_MAX_TOKENS) if isinstance(body, CompletionBody) else room
    if asked > room:
        raise ContextLengthExceeded(
            f"{num_prompt_tokens} prompt tokens and {asked} to generate exceed this model's {max_model_len}", param=pointer
        )
    return asked


def num_logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    return (body.top_logprobs or 0) if isinstance(body, ChatBody) and body.logprobs else None


def num_prompt_logprobs(body: GenerationBody) -> int | None:
    echoed = body.logprobs if isinstance(body, CompletionBody) and body.echo else None
    asked = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    return max(asked) if asked else None


def constraint_of(body: GenerationBody) -> PlacedConstraint | None:
    """Raises `InvalidRequest` where there is more than one, or an empty or malformed one; `GrammarTooComplex` for too long a one."""
    placed = _format_constraint(body)
    if body.structured_outputs is not None:
        if placed is not None:
            raise InvalidRequest("response_format and structured_outputs exclude each other", param="/structured_outputs")
        placed = _structured_constraint(body.structured_outputs)
    try:
        check_text(placed.constraint.text if placed else "")
    except GrammarTooComplex as error:  # the engine would say so too, once for each prompt that it was sent with
        raise placed_in_body(error, placed) from None
    return placed


def _format_constraint(body: GenerationBody) -> PlacedConstraint | None:
    match body.response_format:
        case JsonObjectFormat():
            return PlacedConstraint(Constraint("json_object"), "/response_format")
        case JsonSchemaFormat(json_schema=named):
            pointer = "/response_format/json_schema/schema"
            return PlacedConstraint(Constraint("json_schema", _schema_text(named.schema_, pointer)), pointer)
        case _:
            return None


def _structured_constraint(outputs: StructuredOutputs) -> PlacedConstraint:
    given = {
        "json": outputs.json_,
        "regex": outputs.regex,
        "choice": outputs.choice,
        "grammar": outputs.grammar,
    }
    present = [name for name, value in given.items() if value is not None]
    if len(present) != 1:
        raise InvalidRequest("give exactly one of json, regex, choice and grammar", param="/structured_outputs")
    pointer = f"/structured_outputs/{present[0]}"
    if outputs.json_ is not None:
        return PlacedConstraint(Constraint("json_schema", _schema_text(outputs.json_, pointer)), pointer)
    if outputs.choice is not None:
        return PlacedConstraint(Constraint("choice", json.dumps(outputs.choice, ensure_ascii=False)), pointer)
    if outputs.regex is not None:
        return PlacedConstraint(Constraint("regex", outputs.regex), pointer)
    return PlacedConstraint(Constraint("grammar", outputs.grammar or ""), pointer)


def _schema_text(schema: Mapping[str, Any] | str, pointer: str) -> str:
    try:
        value = pydantic_core.from_json(schema, allow_inf_nan=False) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise ValueError("a schema is a JSON object")
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"not a JSON Schema: {error}", param=pointer) from error


def placed_in_body(error: LoramuxError, placed: PlacedConstraint | None) -> LoramuxError:
    """The engine's refusal of a constraint, its pointers made to point into the body."""
    if placed is None or type(error) not in (UnsupportedSchema, GrammarTooComplex, InvalidRequest):
        return error
    details = error.details
    if details and "keywords" in details:
        keywords = [{**keyword, "pointer": placed.pointer + keyword["pointer"]} for keyword in details["keywords"]]
        details = {**details, "keywords": keywords}
    return type(error)(error.message, param=placed.pointer + (error.param or ""), details=details)


def narrowed_salt(tenant_salt: bytes, cache_salt: str | None) -> bytes:
    """A client's `cache_salt` can only divide its tenant's cache: it is hashed under the tenant's salt, fields length-delimited."""
    if cache_salt is None:
        return tenant_salt
    fields = (b"cache_salt", cache_salt.encode())
    message = b"".join(len(field).to_bytes(8, "big") + field for field in fields)
    return hmac.new(tenant_salt, message, hashlib.sha256).digest()


def bad_words_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """Each word as it starts a text and, where that is another token, as it follows a space; as vLLM's `bad_words` does."""
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        if not bare:
            raise InvalidRequest("a bad word must have more than spaces", param="/bad_words")
        found.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    return tuple(found)


def template_messages(messages: Sequence[Message], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Messages as chat templates take them: parts of text joined by newlines; `developer` is `system` where it is not known."""
    return [_template_message(message, knows_developer) for message in messages]


def _template_message(message: Message, knows_developer: bool) -> dict[str, Any]:
    content = message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
    role = "system" if message.role == "developer" and not knows_developer else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content, **named}


def _check_prompt(token_ids: Sequence[int], base: BaseDescription, pointer: str) -> None:
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", param=pointer)
    _check_ids(token_ids, base.vocab_size, pointer)


def _check_ids(token_ids: Sequence[int], vocab_size: int, pointer: str) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(f"token id {max(token_ids)} is not below the vocabulary's {vocab_size}", param=pointer)


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    by_id = {int(token_id): value for token_id, value in bias.items()}
    _check_ids(tuple(by_id), vocab_size, "/logit_bias")
    return by_id


def _min_tokens(min_tokens: int, max_tokens: int) -> int:
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens {min_tokens} is more than the {max_tokens} that may be generated", param="/min_tokens")
    return min_tokens


def _prompt_pointer(body: GenerationBody) -> str:
    return "/messages" if isinstance(body, ChatBody) else "/prompt"


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
