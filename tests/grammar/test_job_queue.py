"""Tenants take turns, and each tenant's jobs keep their order."""

from __future__ import annotations

import threading

from loramux.grammar.job_queue import JobQueue


def test_salts_take_turns() -> None:
    queue: JobQueue[str] = JobQueue()
    for number in range(3):
        queue.push(b"flood", f"flood {number}")
    queue.push(b"one", "one")
    queue.push(b"two", "two 0")
    queue.push(b"two", "two 1")
    assert [queue.pop() for _ in range(6)] == ["flood 0", "one", "two 0", "flood 1", "two 1", "flood 2"]


def test_a_salt_that_returns_waits_behind_the_others() -> None:
    queue: JobQueue[str] = JobQueue()
    queue.push(b"a", "a0")
    queue.push(b"b", "b0")
    queue.push(b"b", "b1")
    assert queue.pop() == "a0"
    queue.push(b"a", "a1")
    assert [queue.pop() for _ in range(3)] == ["b0", "a1", "b1"]


def test_closing_wakes_who_waits() -> None:
    queue: JobQueue[str] = JobQueue()
    popped: list[str | None] = []
    threads = [threading.Thread(target=lambda: popped.append(queue.pop())) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(5)
    queue.push(b"", "late")
    assert popped == [None] * 3 and queue.pop() is None
