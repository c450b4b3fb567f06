from __future__ import annotations

import asyncio

import pytest

from loramux.errors import Conflict, NotFound
from loramux.gateway import operations as module
from loramux.gateway.operations import Operations


async def _done() -> None:
    pass


async def _endless() -> None:
    await asyncio.Event().wait()


async def _refused() -> None:
    raise Conflict("no slot is free")


async def _broken() -> None:
    raise KeyError("a secret")


async def test_work_that_is_done_in_time_is_answered_at_once() -> None:
    operations = Operations(answer_within_s=5)
    operation = operations.start("pin", "a@1", _done())
    assert operation.state == "running" and operations.get(operation.id) is operation
    assert await operations.answered(operation)
    assert operation.state == "done" and operation.failure is None


async def test_work_that_fails_in_time_raises() -> None:
    operations = Operations(answer_within_s=5)
    operation = operations.start("pin", "a@1", _refused())
    with pytest.raises(Conflict):
        await operations.answered(operation)
    assert operation.state == "failed" and operation.failure is not None and operation.failure.code == "conflict"


async def test_an_unexpected_failure_tells_nothing_of_itself() -> None:
    operation = Operations().start("pin", "a@1", _broken())
    await asyncio.wait({operation.task})
    assert operation.failure is not None and operation.failure.code == "internal_error" and "secret" not in operation.failure.message


async def test_work_that_takes_longer_goes_on_until_it_is_cut_off() -> None:
    operations = Operations(answer_within_s=0.01)
    operation = operations.start("pin", "a@1", _endless())
    assert not await operations.answered(operation)
    assert operation.state == "running" and operation.failure is None
    await operations.close()
    assert operation.state == "failed" and operation.failure is not None and operation.failure.code == "cancelled"


async def test_the_latest_that_ended_and_all_that_run_are_remembered() -> None:
    operations = Operations(answer_within_s=5)
    running = operations.start("pin", "a@1", _endless())
    first, *others = [operations.start("pin", "a@1", _done()) for _ in range(module._MAX_KEPT + 1)]
    await asyncio.wait({operation.task for operation in (first, *others)})
    last = operations.start("pin", "a@1", _done())
    with pytest.raises(NotFound):
        operations.get(first.id)
    assert {operations.get(operation.id).state for operation in others} == {"done"}
    assert operations.get(running.id).state == operations.get(last.id).state == "running"
    await operations.close()
