"""Pure ASGI: request ids, the body limit and the access log. Nothing here wraps `receive` so as to hide a disconnect."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.errors import BodyTooLarge, InvalidRequest, LoramuxError, RequestTimeout
from loramux.gateway.http_errors import error_response, unexpected

access_log = logging.getLogger("loramux.access")
log = logging.getLogger("loramux.gateway")

_PROBES = frozenset({"/health/live", "/health/ready", "/metrics"})
"""Asked every few seconds for ever; logged at DEBUG."""
_CLIENT_ID = re.compile(r"(?!.*lmx_)[A-Za-z0-9._:-]{1,128}")
"""Anything that could be a key by mistake is not echoed and not logged."""
_KEY_IN_PATH = re.compile(r"lmx_[A-Za-z0-9._-]*")
_STALLED_BODY_S = 60.0
"""A client that sends no byte of its body for so long is taken for gone."""


def new_request_id() -> str:
    return "req_" + secrets.token_hex(12)


class RequestContext:
    """Gives each request its id, answers what nothing else caught, and writes one access line however it ended."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id = new_request_id()
        client_id = Headers(scope=scope).get("x-client-request-id", "")
        state["client_request_id"] = client_id = client_id if _CLIENT_ID.fullmatch(client_id) else ""
        status, complete, started = 0, False, time.monotonic()

        async def send_with_ids(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if client_id:
                    headers["x-client-request-id"] = client_id
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, send_with_ids)
        except Exception as error:
            if not isinstance(error, LoramuxError):
                log.exception("request failed", extra={"fields": {"request_id": request_id}})
            if complete:
                return
            if status:
                raise  # half a response: the server must cut the connection
            await error_response(unexpected(error), request_id)(scope, receive, send_with_ids)
        finally:
            level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
            access_log.log(level, "request", extra={"fields": _access_fields(scope, state, status, time.monotonic() - started)})


def _access_fields(scope: Scope, state: MutableMapping[str, Any], status: int, duration_s: float) -> dict[str, Any]:
    """The path without its query; ids of tenant and key, never a key."""
    fields = {name: state.get(name) for name in ("request_id", "client_request_id", "tenant_id", "key_id")}
    fields |= {
        "method": scope["method"],
        "path": _KEY_IN_PATH.sub("lmx_...", scope["path"]),
        "status": status,
        "duration_ms": round(duration_s * 1e3, 1),
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


class BodyLimit:
    """Refuses a body over `limit(scope)` bytes with 413, whether its length was declared or it came in chunks; one that stalls with 408.

    What comes after the body, a disconnect, may take as long as it likes.
    """

    def __init__(self, app: ASGIApp, limit: Callable[[Scope], int]) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit_bytes, num_bytes = self.limit(scope), 0
        declared = Headers(scope=scope).get("content-length", "0")
        if not (declared.isascii() and declared.isdigit()):
            raise InvalidRequest("The content-length header is not a number.")
        if int(declared) > limit_bytes:
            raise BodyTooLarge(f"The body is larger than {limit_bytes} bytes.")

        complete = False

        async def receive_counted() -> Message:
            nonlocal num_bytes, complete
            try:
                async with asyncio.timeout(None if complete else _STALLED_BODY_S):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout(f"No byte of the body came for {_STALLED_BODY_S:g} s.") from None
            complete = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit_bytes:
                raise BodyTooLarge(f"The body is larger than {limit_bytes} bytes.")
            return message

        await self.app(scope, receive_counted, send)
