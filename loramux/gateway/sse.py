"""Server-sent events over plain ASGI: each event is sent as it comes, and a client that leaves is noticed at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
STALLED_CLIENT_S = 60.0
"""A client that takes no byte for so long is taken for gone."""

_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed its connection before it was answered; nobody reads what is sent now."""


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def error_event(body: Any) -> bytes:
    """A failure in mid-stream: the body that the failure would have had with a status of its own."""
    return b"event: error\ndata: " + _encode(body) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises `ClientGone`, with `work` cancelled and ended, when the client leaves first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(watcher)
        await _cancel(task)


class EventStream(Response):
    """A 200 whose body is `chunks`, already in the form of events.

    `chunks` raises nothing and ends soon after `on_disconnect` was called, which is harmless at its end; it is read to its end
    however sending goes.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], on_disconnect: Callable[[], None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_all(send)
        except (OSError, TimeoutError):
            pass  # the client is gone or takes nothing
        finally:
            self._on_disconnect()
            await _cancel(watcher)
            await self._drain()

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self._on_disconnect()

    async def _send_all(self, send: Send) -> None:
        async for chunk in self._chunks:
            async with asyncio.timeout(STALLED_CLIENT_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _drain(self) -> None:
        async for _ in self._chunks:
            pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task
