"""The `openai` client, unchanged, over a socket."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

from loramux.engine.types import RequestEnd
from loramux.errors import EngineFailed, GrammarTooComplex, QueueFull, UnsupportedSchema
from loramux.grammar.types import Constraint
from tests.fakes import Behaviour
from tests.gateway.openai.conftest import BASE, DIGEST, Gateway

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}


def test_chat(gateway: Gateway) -> None:
    gateway.say("hello there, Zoë")
    raw = gateway.client().chat.completions.with_raw_response.create(model=f"{BASE}:tickets", messages=HELLO)
    answer = raw.parse()
    assert raw.headers["x-loramux-model"] == f"{BASE}:tickets@1; digest={DIGEST['tickets']}"
    assert raw.headers["x-request-id"].startswith("req_")
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", f"{BASE}:tickets", "chatcmpl-")
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "hello there, Zoë")
    assert answer.choices[0].finish_reason == "stop"
    request = gateway.engine.requests[0]
    assert request.adapter_digest == DIGEST["tickets"]
    assert list(request.prompt_token_ids) == gateway.services.tokenizer.apply_chat_template(HELLO)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == len(request.prompt_token_ids) // 32 * 32


async def test_async_chat_stream_with_usage(gateway: Gateway) -> None:
    gateway.say("the quick brown fox 日本")
    async with gateway.async_client() as client:
        stream = await client.chat.completions.create(model=BASE, messages=HELLO, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "the quick brown fox 日本"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-2].choices[0].delta.content is None
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == gateway.engine.ends[0].num_completion_tokens


def test_a_stream_says_what_the_whole_answer_says(gateway: Gateway) -> None:
    client = gateway.client()
    whole = client.chat.completions.create(model=BASE, messages=HELLO, n=3, seed=7, max_tokens=12)
    texts: dict[int, str] = {0: "", 1: "", 2: ""}
    reasons: dict[int, str] = {}
    roles: list[int] = []
    for chunk in client.chat.completions.create(model=BASE, messages=HELLO, n=3, seed=7, max_tokens=12, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
        roles += [choice.index] if choice.delta.role else []
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) == 3
    assert reasons == {0: "length", 1: "length", 2: "length"}
    assert sorted(roles) == [0, 1, 2]
    assert whole.usage is not None and whole.usage.completion_tokens == 36
    assert whole.usage.prompt_tokens == len(gateway.engine.requests[0].prompt_token_ids)


def test_stop(gateway: Gateway) -> None:
    gateway.say("the quick brown fox")
    answer = gateway.client().chat.completions.create(model=BASE, messages=HELLO, stop=["brown", "zzz"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("the quick ", "stop")
    assert answer.choices[0].stop_reason == "brown"  # type: ignore[attr-defined]


def test_chat_logprobs(gateway: Gateway) -> None:
    gateway.say("hello Zoë")
    answer = gateway.client().chat.completions.create(model=BASE, messages=HELLO, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes or []) for token in content).decode() == "hello Zoë<|im_end|>"
    assert answer.usage is not None and len(content) == answer.usage.completion_tokens
    assert [len(token.top_logprobs) for token in content] == [2] * len(content)
    assert content[0].top_logprobs[0].token == content[0].token and content[0].logprob == -0.5
    streamed = []
    for chunk in gateway.client().chat.completions.create(model=BASE, messages=HELLO, logprobs=True, top_logprobs=2, stream=True):
        streamed += (chunk.choices[0].logprobs.content or []) if chunk.choices[0].logprobs else []
    assert streamed == content


def test_json_schema(gateway: Gateway) -> None:
    gateway.say('{"city": "Rome"}')
    format: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = gateway.client().chat.completions.create(model=BASE, messages=HELLO, response_format=format)
    assert json.loads(answer.choices[0].message.content or "") == {"city": "Rome"}
    constraint = gateway.engine.requests[0].constraint
    assert constraint is not None and constraint.kind == "json_schema" and json.loads(constraint.text) == SCHEMA


def test_structured_outputs_by_extra_body(gateway: Gateway) -> None:
    gateway.client().chat.completions.create(model=BASE, messages=HELLO, extra_body={"structured_outputs": {"choice": ["a", "b"]}})
    assert gateway.engine.requests[0].constraint == Constraint("choice", '["a", "b"]')


def test_completion_with_echo_and_logprobs(gateway: Gateway) -> None:
    gateway.say(" there")
    answer = gateway.client().completions.create(model=BASE, prompt="hello", echo=True, logprobs=1)
    choice = answer.choices[0]
    assert (answer.object, choice.text, choice.finish_reason) == ("text_completion", "hello there", "stop")
    assert choice.logprobs is not None and choice.logprobs.tokens is not None and choice.logprobs.text_offset is not None
    tokens, offsets, logprobs = choice.logprobs.tokens, choice.logprobs.text_offset, choice.logprobs.token_logprobs
    assert tokens[-1] == "<|im_end|>" and logprobs is not None and len(tokens) == len(offsets) == len(logprobs)
    assert logprobs[0] is None and not any(math.isinf(value) for value in logprobs[1:])
    assert "".join(tokens) == "hello there<|im_end|>"
    assert [("hello there<|im_end|>")[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True)]


@pytest.mark.parametrize("prompt", ["hello", ["hello"], ["hello", "the fox"], [20, 21], [[20], [21, 22], [23]]], ids=str)
def test_completion_prompts_whole_and_streamed(gateway: Gateway, prompt: Any) -> None:
    client = gateway.client()
    whole = client.completions.create(model=BASE, prompt=prompt, n=2, seed=1, max_tokens=5)
    num_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in whole.choices] == list(range(2 * num_prompts))
    assert whole.usage is not None and whole.usage.completion_tokens == 10 * num_prompts
    assert whole.usage.prompt_tokens == sum(len(request.prompt_token_ids) for request in gateway.engine.requests)
    texts = dict.fromkeys(range(2 * num_prompts), "")
    usage = None
    options: Any = {"include_usage": True}
    for chunk in client.completions.create(model=BASE, prompt=prompt, n=2, seed=1, max_tokens=5, stream=True, stream_options=options):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert usage == whole.usage


def test_streamed_echo_comes_first(gateway: Gateway) -> None:
    gateway.say(" there")
    chunks = list(gateway.client().completions.create(model=BASE, prompt="hello", echo=True, stream=True))
    assert chunks[0].choices[0].text == "hello"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello there"


def test_prompt_logprobs(gateway: Gateway) -> None:
    answer: Any = gateway.client().completions.create(model=BASE, prompt=[20, 21, 22], max_tokens=1, extra_body={"prompt_logprobs": 1})
    listed = answer.choices[0].prompt_logprobs
    assert listed[0] is None and len(listed) == 3
    assert listed[1]["21"]["logprob"] == -0.5 and listed[1]["21"]["rank"] == 1


def test_models_are_those_of_the_tenant(gateway: Gateway) -> None:
    assert [model.id for model in gateway.client().models.list()] == [BASE, f"{BASE}:tickets"]
    assert [model.id for model in gateway.client("globex").models.list()] == [BASE, f"{BASE}:secret", f"{BASE}:tickets"]
    with gateway.http() as http:  # the client would write `:` and `/` in its own way
        assert http.get(f"/v1/models/{BASE}:tickets@1").json()["id"] == f"{BASE}:tickets@1"
        assert http.get(f"/v1/models/{BASE}:tickets%40prod").status_code == 200
        assert http.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"
    assert gateway.client().models.retrieve(f"{BASE}:tickets").id == f"{BASE}:tickets"


@pytest.mark.parametrize("model", [f"{BASE}:nothing", f"{BASE}:secret", f"{BASE}:tickets@9", "gpt-4o", f"{BASE}:../x", ":", f"{BASE}:"])
def test_unknown_and_not_granted_are_one_answer(gateway: Gateway, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        gateway.client().chat.completions.create(model=model, messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "/model")
    other = _not_found(gateway, f"{BASE}:other")
    assert caught.value.message == other.replace(f"{BASE}:other", model)
    assert gateway.engine.requests == []


def _not_found(gateway: Gateway, model: str) -> str:
    with pytest.raises(openai.NotFoundError) as caught:
        gateway.client().chat.completions.create(model=model, messages=HELLO)
    return caught.value.message


def test_typed_exceptions(gateway: Gateway) -> None:
    chat = gateway.client().chat.completions
    with pytest.raises(openai.BadRequestError) as bad:
        chat.create(model=BASE, messages=HELLO, temperature=-1)
    assert (bad.value.code, bad.value.param, bad.value.type) == ("invalid_request", "/temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        chat.create(model=BASE, messages=[{"role": "user", "content": "fox " * 400}])
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "/messages")
    with pytest.raises(openai.BadRequestError) as tools:
        chat.create(model=BASE, messages=HELLO, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (tools.value.code, tools.value.param) == ("unsupported_parameter", "/tools")
    with pytest.raises(openai.AuthenticationError) as key:
        gateway.client("wrong-key").chat.completions.create(model=BASE, messages=HELLO)
    assert "wrong-key" not in key.value.message
    with pytest.raises(openai.PermissionDeniedError):
        gateway.client("admin-only").chat.completions.create(model=BASE, messages=HELLO)
    assert gateway.engine.requests == []


@pytest.mark.parametrize("stream", [True, False])
def test_the_status_waits_for_the_engines_refusal(gateway: Gateway, stream: bool) -> None:
    keywords = [{"pointer": "/properties/city/not", "keyword": "not", "reason": "no backend enforces it"}]
    gateway.engine.behaviour = Behaviour(refuse=UnsupportedSchema("no", details={"keywords": keywords}))
    format: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client().chat.completions.create(model=BASE, messages=HELLO, response_format=format, stream=stream)
    body: Any = caught.value.body
    assert body["code"] == "unsupported_schema" and body["param"] == "/response_format/json_schema/schema"
    assert body["details"]["keywords"][0]["pointer"] == "/response_format/json_schema/schema/properties/city/not"
    gateway.engine.behaviour = Behaviour(refuse=GrammarTooComplex("slow"))
    with pytest.raises(openai.BadRequestError) as slow:
        gateway.client().chat.completions.create(model=BASE, messages=HELLO, response_format=format, stream=stream)
    assert slow.value.code == "grammar_too_complex"
    gateway.engine.behaviour = Behaviour(refuse=QueueFull("too many"))
    with pytest.raises(openai.RateLimitError) as full:
        gateway.client().chat.completions.create(model=BASE, messages=HELLO, stream=stream)
    assert full.value.response.headers["retry-after"] == "1"


def test_a_failing_engine_is_a_500_and_a_lost_one_a_503(gateway: Gateway) -> None:
    gateway.engine.behaviour = Behaviour(fail_after=2)
    with pytest.raises(openai.InternalServerError) as failed:
        gateway.client().chat.completions.create(model=BASE, messages=HELLO)
    assert (failed.value.status_code, failed.value.code) == (500, EngineFailed.code)
    gateway.engine.behaviour = Behaviour(die_after=2)
    with pytest.raises(openai.InternalServerError) as died:
        gateway.client().chat.completions.create(model=BASE, messages=HELLO)
    assert (died.value.status_code, died.value.code) == (503, "no_engine")
    with pytest.raises(openai.InternalServerError) as gone:
        gateway.client().chat.completions.create(model=BASE, messages=HELLO)
    assert gone.value.response.headers["retry-after"]


@pytest.mark.parametrize("behaviour", [Behaviour(fail_after=3), Behaviour(die_after=3)], ids=["fails", "dies"])
def test_the_client_raises_on_a_failure_in_mid_stream(gateway: Gateway, behaviour: Behaviour) -> None:
    gateway.engine.behaviour = behaviour
    stream = gateway.client().chat.completions.create(model=BASE, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError):
        list(stream)
    end: RequestEnd = gateway.engine.ends[0]
    assert (end.end, end.num_completion_tokens) == ("failed", 3)


def test_cache_salt_and_priority_reach_the_engine(gateway: Gateway) -> None:
    client, other = gateway.client(), gateway.client("globex")
    client.chat.completions.create(model=BASE, messages=HELLO, max_tokens=1, extra_body={"priority": -2})
    client.chat.completions.create(model=BASE, messages=HELLO, max_tokens=1, extra_body={"cache_salt": "x"})
    other.chat.completions.create(model=BASE, messages=HELLO, max_tokens=1, extra_body={"cache_salt": "x"})
    assert gateway.engine.requests[0].priority == -2
    assert len({request.salt for request in gateway.engine.requests}) == 3
