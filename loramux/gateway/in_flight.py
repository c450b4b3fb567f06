"""Counts the requests being answered, so that a gateway that takes no more can wait for the rest."""

from __future__ import annotations

import asyncio

from loramux.gateway.metrics import Metrics


class InFlight:
    """One per gateway process. Every `enter` is followed by exactly one `leave`, however the request ends."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_requests = 0

    def enter(self) -> None:
        self._count(1)

    def leave(self) -> None:
        self._count(-1)

    async def empty(self) -> None:
        """Return when no request is being answered."""
        await self._empty.wait()

    def _count(self, change: int) -> None:
        self.num_requests += change
        self._metrics.observe_in_flight(self.num_requests)
        (self._empty.clear if self.num_requests else self._empty.set)()
