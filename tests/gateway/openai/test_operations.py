"""Health, version and metrics at the socket."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from loramux.errors import StoreUnavailable
from loramux.gateway.store.client import Store
from tests.gateway.openai.conftest import BASE, DIGEST, Gateway


class NoStore(Store):
    def __init__(self) -> None:
        pass

    async def ping(self) -> None:
        raise StoreUnavailable("The store can't be reached.")


def test_ready_needs_engine_and_store(gateway: Gateway) -> None:
    services, store = gateway.services, gateway.services.store
    with gateway.http() as http:
        http.headers.pop("authorization")
        assert http.get("/health/live").status_code == http.get("/health/ready").status_code == 200
        gateway.engine.alive = False
        lost = http.get("/health/ready")
        assert lost.status_code == 503 and lost.json()["engine"] is False
        assert http.get("/health/live").status_code == 200
        gateway.engine.revive()
        services.store = NoStore()
        assert http.get("/health/ready").json() == {"status": "not ready", "engine": True, "store": False, "accepting": True}
        services.store = store
        assert http.get("/health/ready").status_code == 200


def test_version(gateway: Gateway) -> None:
    with gateway.http() as http:
        answer = http.get("/version").json()
    assert answer["version"] and answer["engine"]["kernels"] == "reference"


def test_a_base_of_any_name_can_answer(gateway: Gateway) -> None:
    services, name = gateway.services, "模型; ü\r\nx-a: b%"
    services.served_model_name = name
    try:
        with gateway.http() as http:
            answer = http.post("/v1/completions", json={"model": f"{name}:tickets", "prompt": "hello", "max_tokens": 1})
        assert answer.status_code == 200 and answer.json()["model"] == f"{name}:tickets" and "x-a" not in answer.headers
        header = answer.headers["x-loramux-model"]
        assert header == f"{quote(name, safe='')}:tickets@1; digest={DIGEST['tickets']}".replace("x-a%3A", "x-a:")
    finally:
        services.served_model_name = BASE


def test_tokenize_adds_nothing_around_a_chat(gateway: Gateway) -> None:
    body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
    with gateway.http() as http:
        refused = http.post("/tokenize", json={**body, "add_special_tokens": True})
        shown = http.post("/tokenize", json={**body, "return_token_strs": True}).json()
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "/add_special_tokens"
    assert shown["count"] == len(shown["tokens"]) == len(shown["token_strs"]) and shown["max_model_len"] == 256


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_shows_in_the_metrics(gateway: Gateway, stream: bool) -> None:
    def count(text: str, line: str) -> float:
        return next((float(each.rsplit(" ", 1)[1]) for each in text.splitlines() if each.startswith(line)), 0.0)

    requests = 'loramux_requests_total{route="/v1/completions",status="2xx"}'
    tokens = 'loramux_tokens_total{adapter="tickets",kind="completion",tenant="acme"}'
    with gateway.http() as http:
        before = http.get("/metrics").text
        body = {"model": f"{BASE}:tickets", "prompt": "hello", "max_tokens": 5, "stream": stream}
        assert http.post("/v1/completions", json=body).status_code == 200
        after = http.get("/metrics").text
        http.get("/nowhere/at/all")
        assert count(http.get("/metrics").text, 'loramux_requests_total{route="other",status="4xx"}') > 0
    assert count(after, requests) - count(before, requests) == 1
    assert count(after, tokens) - count(before, tokens) == 5
    first_token = "loramux_time_to_first_token_seconds_count"
    assert count(after, first_token) - count(before, first_token) == 1
    assert "nowhere" not in after and count(after, "loramux_requests_in_flight") == 0
