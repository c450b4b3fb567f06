"""Logs as one JSON object a line on standard error. Facts go in `extra={"fields": {...}}`; never a prompt, a salt or a key."""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType

import msgspec

_OWN_WORDS = (RuntimeError, MemoryError, OSError)
"""Exceptions whose messages are torch's or the system's, about shapes and files; any other may quote a request."""


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1]:
            line["exception"] = _describe(record.exc_info[1])
        return msgspec.json.encode(line).decode()


def log_to_stderr(level: int = logging.INFO) -> None:
    """Make JSON lines on standard error the only log of this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _describe(error: BaseException) -> dict[str, object]:
    """The type, where it was raised, and the message where it can't hold a request's text."""
    described: dict[str, object] = {"type": type(error).__name__, "stack": _stack(error.__traceback__)}
    if isinstance(error, _OWN_WORDS):
        described["message"] = str(error)[:500]
    return described


def _stack(trace: TracebackType | None) -> list[str]:
    return [f"{frame.name} {frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(trace)]
