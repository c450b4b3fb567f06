"""Jobs in fair order: one from each tenant in turn, and each tenant's own in the order they came."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class JobQueue(Generic[Job]):
    """Thread-safe. A flood under one salt delays the next job under another by one job at most, per worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._waiting: OrderedDict[bytes, deque[Job]] = OrderedDict()
        """By salt, the one whose turn it is first; none is empty."""

    def push(self, salt: bytes, job: Job) -> None:
        with self._changed:
            self._waiting.setdefault(salt, deque()).append(job)
            self._changed.notify()

    def pop(self) -> Job | None:
        """The next job, waiting for one; None once the queue is closed, whatever is left in it."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            salt, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[salt] = jobs
            return job

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
