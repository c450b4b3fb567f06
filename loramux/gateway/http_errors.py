"""The one place that turns errors into HTTP: `{"error": {"message", "type", "code", "param", "request_id", "details"?}}`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from loramux.errors import InvalidRequest, LoramuxError, MethodNotAllowed, NotFound, UnsupportedParameter

log = logging.getLogger("loramux.gateway")

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CLIENT_CLOSED_REQUEST = 499
"""For the log and the metrics: nobody is there to read it."""
_HTTP_ERRORS = {404: NotFound, 405: MethodNotAllowed}


def error_type(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(error: LoramuxError, request_id: str) -> dict[str, Any]:
    """The contract's error object; also the data of an `error` event in a stream."""
    body: dict[str, Any] = {
        "message": error.message,
        "type": error_type(error.status),
        "code": error.code,
        "param": error.param,
        "request_id": request_id,
    }
    if error.details is not None:
        body["details"] = error.details
    return {"error": body}


def error_response(error: LoramuxError, request_id: str) -> JSONResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error, request_id), status_code=error.status, headers=headers)


def unexpected(error: Exception) -> LoramuxError:
    """An internal error that tells the caller nothing but that it happened; the log has the rest, by request id."""
    return error if isinstance(error, LoramuxError) else LoramuxError("The server failed to answer this request.")


def json_pointer(location: Sequence[str | int]) -> str:
    """RFC 6901."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)


def from_validation(errors: Sequence[Any]) -> InvalidRequest:
    """The first of pydantic's errors. Never repeats the input: it may hold a secret."""
    first = errors[0]
    where, location = str(first["loc"][0]) if first["loc"] else "body", list(first["loc"][1:])
    if first["type"] == "json_invalid":
        return InvalidRequest("The body is not valid JSON.")
    param = json_pointer(location) if where == "body" else f"{where}.{'.'.join(map(str, location))}"
    if first["type"] == "extra_forbidden":
        return UnsupportedParameter(f"{param} is not a parameter that this server supports.", param=param)
    return InvalidRequest(f"{param or 'The body'}: {first['msg']}.", param=param or None)


def from_http_exception(error: HTTPException) -> LoramuxError:
    if isinstance(error.__cause__, LoramuxError):
        return error.__cause__
    cls = _HTTP_ERRORS.get(error.status_code, InvalidRequest if error.status_code < 500 else LoramuxError)
    message = {404: "There is no such route.", 405: "This route does not have that method."}.get(error.status_code, str(error.detail))
    return cls(message)


def install_error_handlers(app: FastAPI) -> None:
    def respond(request: Request, error: LoramuxError) -> JSONResponse:
        return error_response(error, request.state.request_id)

    async def loramux_error(request: Request, error: Exception) -> JSONResponse:
        return respond(request, unexpected(error))

    async def validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return respond(request, from_validation(error.errors()))

    async def http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return respond(request, from_http_exception(error))

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(LoramuxError, loramux_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(Exception, loramux_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_exception)
