"""Every error loramux raises on purpose, and the form in which one crosses a process or HTTP boundary.

LoramuxError
├── InvalidRequest            400 invalid_request
│   ├── UnsupportedParameter  400 unsupported_parameter
│   ├── ContextLengthExceeded 400 context_length_exceeded
│   ├── UnsupportedSchema     400 unsupported_schema      details.keywords
│   └── GrammarTooComplex     400 grammar_too_complex
├── AuthenticationFailed      401 invalid_api_key
├── ScopeMissing              403 insufficient_scope
├── NotFound                  404 not_found
│   └── ModelNotFound         404 model_not_found
├── MethodNotAllowed          405 method_not_allowed
├── RequestTimeout            408 timeout
├── Conflict                  409 conflict
├── BodyTooLarge              413 body_too_large
├── AdapterInvalid            422 adapter_invalid         details.report
├── Limited                   429
│   └── QueueFull             429 queue_full
├── EngineFailed              500 engine_failed           a fault of ours, never of the client
├── Unavailable               503
│   ├── AdapterLoading        503 adapter_loading
│   ├── StoreUnavailable      503 store_unavailable
│   ├── NoEngine              503 no_engine
│   └── Draining              503 draining
└── StartupFailed             exit code 1: one line that says what, and what to do
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as a value, for messages between processes; `LoramuxError.from_failure` raises it again on the other side."""

    code: str
    message: str
    param: str | None = None
    """JSON pointer into the request body."""
    details: dict[str, Any] | None = None


class LoramuxError(Exception):
    """Base of the tree. `status` and `code` are the contract's; `gateway/http_errors.py` alone turns them into HTTP."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retry_after_s: ClassVar[int | None] = None
    """Seconds for the `Retry-After` header, where waiting helps."""

    def __init__(self, message: str, *, param: str | None = None, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details

    def to_failure(self) -> Failure:
        return Failure(code=self.code, message=self.message, param=self.param, details=self.details)

    @staticmethod
    def from_failure(failure: Failure) -> LoramuxError:
        cls = _BY_CODE.get(failure.code, EngineFailed)
        return cls(failure.message, param=failure.param, details=failure.details)


class InvalidRequest(LoramuxError):
    status, code = 400, "invalid_request"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedSchema(InvalidRequest):
    code = "unsupported_schema"


class GrammarTooComplex(InvalidRequest):
    code = "grammar_too_complex"


class AuthenticationFailed(LoramuxError):
    status, code = 401, "invalid_api_key"


class ScopeMissing(LoramuxError):
    status, code = 403, "insufficient_scope"


class NotFound(LoramuxError):
    status, code = 404, "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(LoramuxError):
    status, code = 405, "method_not_allowed"


class RequestTimeout(LoramuxError):
    status, code = 408, "timeout"


class Conflict(LoramuxError):
    status, code = 409, "conflict"


class BodyTooLarge(LoramuxError):
    status, code = 413, "body_too_large"


class AdapterInvalid(LoramuxError):
    status, code = 422, "adapter_invalid"


class Limited(LoramuxError):
    status, code = 429, "rate_limit_exceeded"
    retry_after_s = 1


class QueueFull(Limited):
    code = "queue_full"


class EngineFailed(LoramuxError):
    status, code = 500, "engine_failed"


class Unavailable(LoramuxError):
    status, code = 503, "unavailable"
    retry_after_s = 1


class AdapterLoading(Unavailable):
    code = "adapter_loading"
    retry_after_s = 2


class StoreUnavailable(Unavailable):
    code = "store_unavailable"
    retry_after_s = 2


class NoEngine(Unavailable):
    code = "no_engine"
    retry_after_s = 2


class Draining(Unavailable):
    code = "draining"
    retry_after_s = 5


class StartupFailed(LoramuxError):
    """The process can't start. The message is one line for a person: what is wrong and what to do."""

    code = "startup_failed"


def _tree(cls: type[LoramuxError]) -> list[type[LoramuxError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


_BY_CODE = {cls.code: cls for cls in _tree(LoramuxError)}
