from __future__ import annotations

import json
import time
from typing import Any

import pytest

from loramux.errors import InvalidRequest, UnsupportedParameter
from loramux.gateway.openai.fields import parse
from loramux.gateway.openai.wire import Body, ChatBody, CompletionBody

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps(CHAT | fields).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps(TEXT | fields).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "/temperature"),
        ({"temperature": 2.1}, "/temperature"),
        ({"temperature": "1"}, "/temperature"),
        ({"top_p": 1.1}, "/top_p"),
        ({"top_k": -2}, "/top_k"),
        ({"min_p": 1.5}, "/min_p"),
        ({"n": 0}, "/n"),
        ({"n": 129}, "/n"),
        ({"n": True}, "/n"),
        ({"n": 1.0}, "/n"),
        ({"seed": 2**63}, "/seed"),
        ({"presence_penalty": 3}, "/presence_penalty"),
        ({"frequency_penalty": -2.5}, "/frequency_penalty"),
        ({"repetition_penalty": 0}, "/repetition_penalty"),
        ({"stop": ""}, "/stop"),
        ({"stop": ["a", ""]}, "/stop/1"),
        ({"stop": ["a"] * 17}, "/stop"),
        ({"stop": 3}, "/stop"),
        ({"stop_token_ids": [-1]}, "/stop_token_ids/0"),
        ({"min_tokens": -1}, "/min_tokens"),
        ({"max_tokens": 0}, "/max_tokens"),
        ({"max_completion_tokens": 0}, "/max_completion_tokens"),
        ({"logprobs": 3}, "/logprobs"),
        ({"top_logprobs": 21}, "/top_logprobs"),
        ({"prompt_logprobs": -1}, "/prompt_logprobs"),
        ({"logit_bias": {"a": 1}}, "/logit_bias/a"),
        ({"logit_bias": {"1": 101}}, "/logit_bias/1"),
        ({"logit_bias": {"-1": 1}}, "/logit_bias/-1"),
        ({"bad_words": [""]}, "/bad_words/0"),
        ({"priority": 2**31}, "/priority"),
        ({"cache_salt": ""}, "/cache_salt"),
        ({"stream": "yes"}, "/stream"),
        ({"stream_options": []}, "/stream_options"),
        ({"response_format": {"type": "xml"}}, "/response_format"),
        ({"response_format": {"type": "json_schema"}}, "/response_format/json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "/response_format/json_schema/name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "/response_format/json_schema/name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "/response_format/json_schema/schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}}, "/response_format/json_schema/schema"),
        ({"structured_outputs": {"json": 3}}, "/structured_outputs/json"),
        ({"structured_outputs": {"choice": []}}, "/structured_outputs/choice"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "/structured_outputs/choice/1"),
        ({"structured_outputs": {"regex": ""}}, "/structured_outputs/regex"),
        ({"messages": []}, "/messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "/messages/0/role"),
        ({"messages": [{"role": "user"}]}, "/messages/0/content"),
        ({"messages": [{"role": "user", "content": None}]}, "/messages/0/content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "/messages/0/content"),
        ({"messages": [{"role": ["tool"], "content": "x"}]}, "/messages/0/role"),
        ({"messages": ["tool"]}, "/messages/0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "/messages/0/content/0/type"),
        ({"model": ""}, "/model"),
        ({"model": 7}, "/model"),
    ],
    ids=str,
)
def test_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "/prompt"),
        ({}, "/prompt"),
        ([1, "a"], "/prompt/1"),
        ([[1], "a"], "/prompt/1"),
        ([[]], "/prompt/0"),
        (["a", 1], "/prompt/1"),
        (5, "/prompt"),
    ],
    ids=str,
)
def test_prompts_of_no_known_form(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", ["a", "", ["a", "b"], [1, 2], [[1], [2, 3]]], ids=str)
def test_the_four_forms_of_a_prompt(prompt: Any) -> None:
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "/tools"),
        ({"tool_choice": "required"}, "/tool_choice"),
        ({"functions": [{}]}, "/functions"),
        ({"enforcement": "best_effort"}, "/enforcement"),
        ({"guided_json": {}}, "/guided_json"),
        ({"guided_regex": "a"}, "/guided_regex"),
        ({"best_of": 2}, "/best_of"),
        ({"best_of": True}, "/best_of"),
        ({"suffix": "x"}, "/suffix"),
        ({"reasoning_effort": "low"}, "/reasoning_effort"),
        ({"a/b~": 1}, "/a~1b~0"),
        ({"structured_outputs": {"json": {}, "json_object": True}}, "/structured_outputs/json_object"),
        ({"response_format": {"type": "text", "grammar": "x"}}, "/response_format/grammar"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "/messages/0/tool_calls"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]}, "/messages/0/tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "/messages/0/tool_calls"),
        ({"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]}, "/messages/0/function_call"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c", "content": "y"}]}, "/messages/1/role"),
        ({"messages": [{"role": "function", "name": "f", "content": "y"}]}, "/messages/0/role"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image": "y"}]}]}, "/messages/0/content/0/image"),
    ],
    ids=str,
)
def test_what_is_not_built_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "k"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": False, "functions": None, "enforcement": "strict", "best_of": 1},
        {"guided_json": None, "whatever": None},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}]},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_fine(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b'{"model": "\\ud800"}', b"\xff\xfe", b"[" * 10_000, b'{"n": NaN}'], ids=repr
)
@pytest.mark.parametrize("model", [ChatBody, CompletionBody])
def test_malformed_bodies(model: type[Body], body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(model, body)


def test_a_mistake_does_not_repeat_the_value() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(temperature="a secret")
    assert "secret" not in caught.value.message


def test_pointers_are_escaped() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        chat(messages=[{"role": "user", "content": "x", "a/b~c": 1}])
    assert caught.value.param == "/messages/0/a~1b~0c"


def test_special_tokens_are_added_to_a_completion_and_never_to_a_chat() -> None:
    chat(add_special_tokens=False)
    completion(add_special_tokens=True)
    for parsed in (lambda: chat(add_special_tokens=True), lambda: completion(add_special_tokens=False)):
        with pytest.raises(UnsupportedParameter):
            parsed()


def test_a_prompt_of_a_million_tokens_is_read_in_the_time_of_its_json() -> None:
    body = json.dumps(TEXT | {"prompt": [1] * 1_000_000}).encode()
    started = time.process_time()
    assert len(parse(CompletionBody, body).prompt) == 1_000_000
    assert time.process_time() - started < 1.0
