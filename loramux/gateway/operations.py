"""Work that may outlive the request that started it: the request waits a while, then answers with where to ask."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from loramux.errors import Failure, NotFound
from loramux.gateway.http_errors import unexpected

log = logging.getLogger("loramux.gateway")

ANSWER_WITHIN_S = 30.0
_MAX_KEPT = 1000


@dataclass(frozen=True)
class Operation:
    kind: str
    target: str
    """What it works on: `name@version`."""
    task: asyncio.Task[None]
    id: str = field(default_factory=lambda: f"op_{secrets.token_hex(8)}")

    @property
    def state(self) -> Literal["running", "done", "failed"]:
        if not self.task.done():
            return "running"
        return "done" if self.failure is None else "failed"

    @property
    def failure(self) -> Failure | None:
        """What the work raised; None while it runs."""
        if not self.task.done():
            return None
        if self.task.cancelled():
            return Failure("cancelled", "The server stopped before this was done.")
        error = self.task.exception()
        return unexpected(error).to_failure() if isinstance(error, Exception) else None


class Operations:
    """Of this process: a restart forgets them. Those that ended are remembered, up to a thousand, the latest."""

    def __init__(self, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self._answer_within_s = answer_within_s
        self._operations: dict[str, Operation] = {}

    def start(self, kind: str, target: str, work: Coroutine[Any, Any, None]) -> Operation:
        operation = Operation(kind, target, asyncio.create_task(work))
        operation.task.add_done_callback(lambda _: _log_failure(operation))
        self._operations[operation.id] = operation
        self._forget_old()
        return operation

    async def answered(self, operation: Operation) -> bool:
        """Whether it was done while a request can wait; if not, it goes on. Raises what it failed with."""
        await asyncio.wait({operation.task}, timeout=self._answer_within_s)
        if operation.task.done():
            operation.task.result()
        return operation.task.done()

    def get(self, operation_id: str) -> Operation:
        """Raises NotFound."""
        try:
            return self._operations[operation_id]
        except KeyError:
            raise NotFound("There is no such operation; those of an earlier run of the server are forgotten.") from None

    async def close(self) -> None:
        """Cut off what still runs."""
        tasks = [operation.task for operation in self._operations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget_old(self) -> None:
        ended = [operation for operation in self._operations.values() if operation.task.done()]
        for operation in ended[:-_MAX_KEPT]:
            del self._operations[operation.id]


def _log_failure(operation: Operation) -> None:
    if operation.failure is not None:
        fields = {"id": operation.id, "kind": operation.kind, "target": operation.target, "code": operation.failure.code}
        log.warning(f"an operation failed: {operation.failure.message}", extra={"fields": fields})
