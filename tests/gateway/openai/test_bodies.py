"""Whatever a client sends, the answer is the contract's error and never a 500; and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loramux.gateway.openai.wire import ChatBody, CompletionBody, TokenizeBody
from tests.gateway.openai.conftest import BASE, Gateway, wait_until

FIELDS = sorted(
    {*ChatBody.model_fields, *CompletionBody.model_fields, *TokenizeBody.model_fields, "tools", "guided_json", "x"} - {"messages"}
)
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5) | st.integers(-2, 3)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from([BASE, f"{BASE}:tickets", f"{BASE}:none"]),
    "prompt": st.text(max_size=20) | st.lists(st.integers(0, 500), max_size=4) | st.lists(st.text(max_size=5), max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": st.text(max_size=9)}), max_size=3
    ),
    "max_tokens": st.integers(0, 4),
    "n": st.integers(0, 3),
    "temperature": st.floats(-0.5, 2.5),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 500).map(str), st.floats(-101, 101), max_size=3),
    "stream": st.booleans(),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "json_schema"}, {"type": "text"}, {}, {"type": []}]),
    "structured_outputs": st.fixed_dictionaries({}, optional=dict.fromkeys(("json", "regex", "choice", "grammar"), anything)),
    "tokens": st.lists(st.integers(-1, 2**40), max_size=4),
    "bad_words": st.lists(st.text(max_size=3), max_size=2),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    body = {name: draw(likely[name]) for name in ("model", draw(st.sampled_from(["prompt", "messages", "tokens"])))}
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        body[name] = draw(likely.get(name, anything) | anything)
    return body


@given(path=st.sampled_from(PATHS), body=bodies() | anything)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True)
def test_no_body_is_a_500(gateway: Gateway, path: str, body: Any) -> None:
    with gateway.http() as http:
        response = http.post(path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) <= {"message", "type", "code", "param", "request_id", "details"} and error["message"] and error["code"]
        assert error["param"] is None or error["param"].startswith("/")
    wait_until(lambda: gateway.services.in_flight.num_requests == 0)


@given(content=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True)
def test_no_bytes_are_a_500(gateway: Gateway, content: bytes) -> None:
    with gateway.http() as http:
        response = http.post("/v1/completions", content=content)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("text", ["hello there", "", "\U0001f600 日本\n", "<|im_start|>user"])
def test_tokenize_and_back(gateway: Gateway, text: str) -> None:
    with gateway.http() as http:
        found = http.post("/tokenize", json={"model": BASE, "prompt": text, "return_token_strs": True}).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 256
        assert found["tokens"] == gateway.services.tokenizer.encode(text)
        assert http.post("/detokenize", json={"model": BASE, "tokens": found["tokens"]}).json() == {"prompt": text}


def test_tokenize_messages(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with gateway.http() as http:
        found = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
        assert found["tokens"] == gateway.services.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        both = http.post("/tokenize", json={"messages": messages, "prompt": "hi"})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "/prompt")


def test_a_key_is_asked_for_on_every_route(gateway: Gateway) -> None:
    with gateway.http() as http:
        http.headers.pop("authorization")
        for path in PATHS:
            assert http.post(path, json={}).status_code == 401
        assert http.get("/v1/models").status_code == http.get(f"/v1/models/{BASE}").status_code == 401
