"""Streams byte by byte, and what happens when someone goes away."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from loramux.errors import NoEngine
from loramux.gateway.openai import exchange
from tests.fakes import Behaviour
from tests.gateway.openai.conftest import BASE, Gateway, wait_until

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hello"}]}


def events(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """(event, data) of each event."""
    for block in response.text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        yield fields.get("event", "message"), fields["data"]


def test_a_stream_on_the_wire(gateway: Gateway) -> None:
    gateway.say("hi")
    with gateway.http() as http:
        response = http.post("/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    assert "content-length" not in response.headers and response.headers["x-loramux-model"].startswith(f"{BASE}; digest=sha256:")
    *chunks, done = list(events(response))
    assert done == ("message", "[DONE]") and {name for name, _ in chunks} == {"message"}
    choices = [json.loads(data)["choices"] for _, data in chunks]
    assert choices[0] == [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]
    assert choices[-2] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    assert choices[-1] == [] and json.loads(chunks[-1][1])["usage"]["completion_tokens"] == gateway.engine.ends[0].num_completion_tokens


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("behaviour", "code"), [(Behaviour(fail_after=2), "engine_failed"), (Behaviour(die_after=2), "no_engine")], ids=["fails", "dies"]
)
def test_a_failure_in_mid_stream_is_an_error_event_then_done(gateway: Gateway, path: str, behaviour: Behaviour, code: str) -> None:
    gateway.engine.behaviour = behaviour
    body = CHAT if "chat" in path else {"model": BASE, "prompt": ["hello", "there"]}
    with gateway.http() as http:
        response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    *chunks, failure, done = list(events(response))
    assert chunks and done == ("message", "[DONE]")
    error = json.loads(failure[1])["error"]
    assert failure[0] == "error" and (error["code"], error["type"]) == (code, "server_error")
    assert error["request_id"] == response.headers["x-request-id"]
    assert all(json.loads(data)["choices"][0]["finish_reason"] is None for _, data in chunks)


@pytest.mark.parametrize("behaviour", [Behaviour(), Behaviour(hang_after=3), Behaviour(never_admit=True)], ids=["runs", "hangs", "queued"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_aborts_within_a_step(gateway: Gateway, behaviour: Behaviour, stream: bool, prompts: int) -> None:
    gateway.engine.behaviour, gateway.engine.step_s = behaviour, 0.05
    body = {"model": BASE, "prompt": ["hello"] * prompts, "max_tokens": 200, "stream": stream}
    connection = _post(gateway, "/v1/completions", body)
    wait_until(lambda: len(gateway.engine.running) == prompts)
    time.sleep(0.12)
    num_tokens = max(len(choice.token_ids) for generation in gateway.engine.running.values() for choice in generation._choices)
    connection.close()
    wait_until(lambda: len(gateway.engine.ends) == prompts, timeout_s=1.0)
    assert {end.end for end in gateway.engine.ends} == {"aborted"}
    assert max(end.num_completion_tokens for end in gateway.engine.ends) <= num_tokens + 2
    wait_until(lambda: gateway.services.in_flight.num_requests == 0)


def _post(gateway: Gateway, path: str, body: Any) -> socket.socket:
    address, content = urlsplit(gateway.url), json.dumps(body).encode()
    connection = socket.create_connection((address.hostname or "", address.port or 0))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys['acme']}\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("behaviour", [Behaviour(hang_after=2), Behaviour(never_admit=True)], ids=["hangs", "queued"])
def test_request_timeout_is_a_408(gateway: Gateway, behaviour: Behaviour) -> None:
    gateway.engine.behaviour = behaviour
    gateway.change_settings(request_timeout=0.2)
    with gateway.http() as http:
        response = http.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")
    assert gateway.engine.ends[0].end == "aborted"


def test_request_timeout_in_a_stream_is_an_error_event(gateway: Gateway) -> None:
    gateway.engine.behaviour = Behaviour(hang_after=2)
    gateway.change_settings(request_timeout=0.2)
    with gateway.http() as http:
        *_, failure, done = list(events(http.post("/v1/chat/completions", json=CHAT | {"stream": True})))
    assert json.loads(failure[1])["error"]["code"] == "timeout" and done[1] == "[DONE]"
    assert gateway.engine.ends[0].end == "aborted"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [1, 2])
def test_an_engine_that_hangs_holds_up_no_timeout_and_no_record(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, stream: bool, prompts: int
) -> None:
    """Three tokens of each prompt were seen; the late records of the engine count no second time."""
    monkeypatch.setattr(exchange, "_CLOSE_S", 0.3)
    gateway.engine.behaviour = Behaviour(hang_after=3, deaf=True)
    gateway.change_settings(request_timeout=0.3)
    body = {"model": BASE, "prompt": ["hello"] * prompts, "max_tokens": 200, "stream": stream}
    before, started = _num_completion_tokens(gateway), time.monotonic()
    with gateway.http() as http:
        response = http.post("/v1/completions", json=body)
    assert time.monotonic() - started < 2.0
    assert '"code":"timeout"' in response.text.replace(" ", "") and response.status_code == (200 if stream else 408)
    wait_until(lambda: gateway.services.in_flight.num_requests == 0)
    assert _num_completion_tokens(gateway) - before == 3 * prompts
    for generation in list(gateway.engine.running.values()):
        generation._task.get_loop().call_soon_threadsafe(generation.fail, NoEngine("lost at last"))
    wait_until(lambda: len(gateway.engine.ends) == prompts)
    assert _num_completion_tokens(gateway) - before == 3 * prompts


def _num_completion_tokens(gateway: Gateway) -> float:
    lines = gateway.services.metrics.expose().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("loramux_tokens_total{") and 'kind="completion"' in line)


def test_draining_refuses_new_requests_and_finishes_the_old(gateway: Gateway) -> None:
    gateway.engine.step_s = 0.02
    answers: list[httpx.Response] = []

    def ask() -> None:
        with gateway.http() as http:
            answers.append(http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 10}))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: gateway.services.in_flight.num_requests == 1)
    gateway.services.draining = True
    with gateway.http() as http:
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining") and refused.headers["retry-after"]
        assert http.get("/health/ready").status_code == 503
    thread.join()
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 10


def test_a_slow_reader_gets_everything(gateway: Gateway) -> None:
    with gateway.http() as http, http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "n": 4}) as response:
        time.sleep(0.3)
        text = b"".join(response.iter_raw(chunk_size=64)).decode()
    assert text.endswith("data: [DONE]\n\n") and text.count('"finish_reason":"length"') == 4
