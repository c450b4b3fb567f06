from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.errors import QueueFull
from loramux.gateway import middleware
from loramux.gateway.http_errors import install_error_handlers
from loramux.gateway.middleware import BodyLimit, RequestContext


def _app() -> ASGIApp:
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/length")
    async def length(request: Request) -> int:
        return len(await request.body())

    @app.post("/parsed")
    async def parsed(body: dict[str, Any]) -> int:
        return len(body)

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the secret of the house")

    @app.get("/busy")
    async def busy() -> None:
        raise QueueFull("too many")

    return RequestContext(BodyLimit(app, lambda scope: 100))


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(_app(), raise_app_exceptions=True), base_url="http://gateway") as client:
        yield client


async def _chunks(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield b"1" * size


async def test_a_body_that_stalls_is_a_408_and_its_end_is_not(monkeypatch: pytest.MonkeyPatch, http: httpx.AsyncClient) -> None:
    monkeypatch.setattr(middleware, "_STALLED_BODY_S", 0.05)

    async def stalled() -> AsyncIterator[bytes]:
        yield b"1"
        await asyncio.sleep(5)

    for path in ("/length", "/parsed"):
        response = await http.post(path, content=stalled(), headers={"content-type": "application/json"})
        assert response.status_code == 408 and response.json()["error"]["code"] == "timeout"

    async def wait_for_the_end(scope: Scope, receive: Receive, send: Send) -> None:
        assert not (await receive()).get("more_body", False)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.2)

    async def receive() -> Message:
        if received:
            await asyncio.sleep(5)
        received.append(None)
        return {"type": "http.request", "body": b"1"}

    received: list[None] = []
    await BodyLimit(wait_for_the_end, lambda scope: 100)({"type": "http", "headers": []}, receive, None)  # type: ignore[arg-type]


async def test_a_client_that_leaves_while_it_sends_is_no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/length", "raw_path": b"/length", "query_string": b"", "headers": []}
    await _app()(scope, receive, send)
    assert sent[0]["status"] == 499 and not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_request_ids_are_the_servers(http: httpx.AsyncClient) -> None:
    responses = [await http.post("/length", headers={"x-request-id": "mine", "x-client-request-id": "job-7:a"}) for _ in range(2)]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == 2 and all(re.fullmatch(r"req_[0-9a-f]{24}", each) for each in ids)
    assert responses[0].headers["x-client-request-id"] == "job-7:a"


@pytest.mark.parametrize("mine", ["a b", "x" * 129, "é".encode("latin-1"), '{"a":1}'])
async def test_a_client_id_out_of_form_is_dropped(http: httpx.AsyncClient, mine: str | bytes) -> None:
    assert "x-client-request-id" not in (await http.post("/length", headers=[("x-client-request-id", mine)])).headers


@pytest.mark.parametrize("path", ["/length", "/parsed"])
async def test_the_body_limit_counts_declared_and_chunked_bodies(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.post("/length", content=b"1" * 100)).json() == 100
    assert (await http.post("/length", content=_chunks(50, 50))).json() == 100
    for content in (b"1" * 101, _chunks(50, 50, 1), _chunks(101)):
        response = await http.post(path, content=content)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("declared", ["-5", "+5", "five", "5_0", ""])
async def test_a_length_that_is_no_number(http: httpx.AsyncClient, declared: str) -> None:
    response = await http.post("/length", content=_chunks(1), headers={"content-length": declared})
    assert response.status_code == 400


async def test_an_unexpected_error_tells_nothing(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    response = await http.get("/broken")
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["code"] == "internal_error" and error["type"] == "server_error"
    assert "secret" not in response.text and error["request_id"] == response.headers["x-request-id"]
    assert any(record.exc_info and getattr(record, "fields")["request_id"] == error["request_id"] for record in caplog.records)  # noqa: B009


async def test_retry_after_is_always_there(http: httpx.AsyncClient) -> None:
    response = await http.get("/busy")
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_the_access_line(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loramux.access")
    await http.post("/length?key=hidden", headers={"authorization": "Bearer hidden"})
    (fields,) = [record.fields for record in caplog.records if record.name == "loramux.access"]  # type: ignore[attr-defined]
    assert (fields["method"], fields["path"], fields["status"]) == ("POST", "/length", 200)
    assert "hidden" not in json.dumps(fields)


async def test_a_disconnect_reaches_the_route() -> None:
    seen: list[str] = []

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([(await receive())["type"] for _ in range(2)])

    messages = iter([{"type": "http.request", "body": b"x", "more_body": False}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await RequestContext(BodyLimit(route, lambda scope: 100))(scope, receive, send)
    assert seen == ["http.request", "http.disconnect"]
