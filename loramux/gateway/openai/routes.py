"""GET /v1/models, POST /v1/completions, /v1/chat/completions, /tokenize and /detokenize.

What takes time with the size of a body, reading it included, runs in a thread: it would hold up every stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from loramux.errors import Draining, InvalidRequest, LoramuxError, UnsupportedParameter
from loramux.gateway.deps import InferPrincipal, ServicesDep
from loramux.gateway.http_errors import CLIENT_CLOSED_REQUEST, error_body
from loramux.gateway.openai.exchange import Call, Exchange
from loramux.gateway.openai.fields import parse
from loramux.gateway.openai.models import MODEL_HEADER, Resolved, resolve, visible_ids
from loramux.gateway.openai.responses import ChatFormat, CompletionFormat, Format
from loramux.gateway.openai.translate import check_combinations, constraint_of, template_messages, to_request
from loramux.gateway.openai.wire import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, Message, TokenizeBody
from loramux.gateway.services import Services
from loramux.gateway.sse import ClientGone, EventStream, unless_disconnected
from loramux.gateway.tenancy.types import Principal
from loramux.gateway.tokenizer import ChatTokenizer, EchoedText

router = APIRouter()


@router.get("/v1/models")
async def list_models(services: ServicesDep, principal: InferPrincipal) -> Response:
    return _json({"object": "list", "data": [_model_card(id) for id in await visible_ids(services, principal)]})


@router.get("/v1/models/{id:path}")
async def get_model(id: str, services: ServicesDep, principal: InferPrincipal) -> Response:
    resolved = await resolve(services, principal, id)
    return _json(_model_card(id, resolved), {MODEL_HEADER: resolved.header})


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, services: ServicesDep, principal: InferPrincipal) -> Response:
    arrived_at = _arrive(services)
    body = await asyncio.to_thread(_parse_chat, await request.body())
    resolved = await resolve(services, principal, body.model)

    def call() -> Call:
        prompt = _chat_ids(services.tokenizer, body.messages, True)
        answer = ChatFormat(_bare_id(request), int(time.time()), body.model, services.tokenizer)
        return _call(request, services, principal, body, [prompt], resolved, answer, arrived_at)

    return await _answer(request, services, resolved, call)


@router.post("/v1/completions")
async def completions(request: Request, services: ServicesDep, principal: InferPrincipal) -> Response:
    arrived_at = _arrive(services)
    body = await asyncio.to_thread(_parse_completion, await request.body())
    resolved = await resolve(services, principal, body.model)

    def call() -> Call:
        prompts = _prompts(body)
        echoes = _echoes(services.tokenizer, prompts) if body.echo else ()
        token_ids = [list(echo.token_ids) for echo in echoes] or _prompt_ids(services.tokenizer, prompts)
        answer = CompletionFormat(
            _bare_id(request),
            int(time.time()),
            body.model,
            services.tokenizer,
            n=body.n or 1,
            echoes=echoes,
            with_logprobs=body.logprobs is not None,
        )
        return _call(request, services, principal, body, token_ids, resolved, answer, arrived_at)

    return await _answer(request, services, resolved, call)


@router.post("/tokenize")
async def tokenize(request: Request, services: ServicesDep, principal: InferPrincipal) -> Response:
    body = await asyncio.to_thread(parse, TokenizeBody, await request.body())
    resolved = await resolve(services, principal, body.model or services.served_model_name)
    answer = await asyncio.to_thread(_tokenize, services.tokenizer, body)
    return _json({**answer, "max_model_len": resolved.info.base.max_model_len})


@router.post("/detokenize")
async def detokenize(request: Request, services: ServicesDep, principal: InferPrincipal) -> Response:
    body = await asyncio.to_thread(parse, DetokenizeBody, await request.body())
    await resolve(services, principal, body.model or services.served_model_name)
    return _json({"prompt": await asyncio.to_thread(services.tokenizer.decode, body.tokens)})


def _parse_chat(raw: bytes) -> ChatBody:
    body = parse(ChatBody, raw)
    check_combinations(body, num_prompts=1)
    return body


def _parse_completion(raw: bytes) -> CompletionBody:
    body = parse(CompletionBody, raw)
    check_combinations(body, num_prompts=len(_prompts(body)))
    return body


def _arrive(services: Services) -> float:
    if services.draining:
        raise Draining("this gateway is shutting down")
    return asyncio.get_running_loop().time()


def _call(
    request: Request,
    services: Services,
    principal: Principal,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    resolved: Resolved,
    answer: Format,
    arrived_at: float,
) -> Call:
    request_id: str = request.state.request_id
    requests = [
        to_request(
            body,
            token_ids,
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{position}",
            principal=principal,
            target=resolved.target,
            encode=lambda text: services.tokenizer.encode(text, add_special_tokens=False),
        )
        for position, token_ids in enumerate(prompts)
    ]
    return Call(
        requests=requests,
        format=answer,
        placed=constraint_of(body),
        version=resolved.version,
        arrived_at=arrived_at,
        timeout_s=services.settings.request_timeout,
        stream=body.stream or False,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        error_body=_error_body(request_id),
    )


async def _answer(request: Request, services: Services, resolved: Resolved, prepare: Callable[[], Call]) -> Response:
    """The status waits for the engine's admission; from then on a stream reports failures as events. Called as soon as the model is
    resolved: from then on its bytes stay."""
    services.in_flight.enter(resolved.version)
    try:
        call = await asyncio.to_thread(prepare)
    except BaseException:
        services.in_flight.leave(resolved.version)
        raise
    exchange = Exchange(services.engine, call, services.metrics, services.in_flight)
    headers = {MODEL_HEADER: resolved.header}
    try:
        if call.stream:
            await unless_disconnected(request.receive, exchange.admit())
            return EventStream(exchange.events(), exchange.abort, headers)
        return _json(await unless_disconnected(request.receive, exchange.whole()), headers)
    except ClientGone:
        await exchange.close()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        await exchange.close()
        raise


def _error_body(request_id: str) -> Callable[[LoramuxError], dict[str, Any]]:
    return lambda error: error_body(error, request_id)


def _bare_id(request: Request) -> str:
    return str(request.state.request_id).removeprefix("req_")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a body whose `prompt` is one text, texts, one list of tokens, or lists of tokens."""
    prompt: Any = body.prompt
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if single else list(prompt)


def _prompt_ids(tokenizer: ChatTokenizer, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _echoes(tokenizer: ChatTokenizer, prompts: Sequence[str | list[int]]) -> list[EchoedText]:
    return [tokenizer.encode_echoed(prompt) if isinstance(prompt, str) else tokenizer.decode_echoed(prompt) for prompt in prompts]


def _chat_ids(tokenizer: ChatTokenizer, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    known = template_messages(messages, knows_developer=tokenizer.knows_developer_role)
    return tokenizer.apply_chat_template(known, add_generation_prompt=add_generation_prompt)


def _tokenize(tokenizer: ChatTokenizer, body: TokenizeBody) -> dict[str, Any]:
    token_ids = _tokenize_ids(tokenizer, body)
    answer: dict[str, Any] = {"count": len(token_ids), "tokens": token_ids}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
    return answer


def _tokenize_ids(tokenizer: ChatTokenizer, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give exactly one of prompt and messages", param="/prompt")
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise UnsupportedParameter("the chat template writes the special tokens; none are added around it", param="/add_special_tokens")
    return _chat_ids(tokenizer, body.messages, body.add_generation_prompt is not False)


def _model_card(id: str, resolved: Resolved | None = None) -> dict[str, Any]:
    created = int(resolved.version.created_at) if resolved and resolved.version else 0
    card = {"id": id, "object": "model", "created": created, "owned_by": "loramux"}
    if resolved is not None:
        card["max_model_len"] = resolved.info.base.max_model_len
    return card


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)
