"""Counts the requests being answered."""

from __future__ import annotations

from loramux.gateway.metrics import Metrics


class InFlight:
    """One per gateway process. Every `enter` is followed by exactly one `leave`, however the request ends."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.num_requests = 0

    def enter(self) -> None:
        self._count(1)

    def leave(self) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        self.num_requests += change
        self._metrics.observe_in_flight(self.num_requests)
