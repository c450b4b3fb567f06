"""Counts the requests being answered, by the adapter version that answers."""

from __future__ import annotations

from collections import Counter

from loramux.adapters.types import AdapterVersion
from loramux.gateway.metrics import Metrics


class InFlight:
    """One per gateway process. Every `enter` is followed by exactly one `leave` of the same version, however the request ends.

    A request enters in the same turn of the event loop in which its version is resolved. A deletion asks the store once more before
    it frees anything, and by then whoever resolved the version before it was deleted has entered.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_version: Counter[tuple[str, str] | None] = Counter()
        """By id and digest; None is the base. A version that nobody uses has no entry."""

    @property
    def num_requests(self) -> int:
        return self._by_version.total()

    @property
    def digests(self) -> frozenset[str]:
        """Of the adapters in use."""
        return frozenset(key[1] for key in self._by_version if key is not None)

    def num_of(self, version: AdapterVersion) -> int:
        return self._by_version.get(_key(version), 0)

    def enter(self, version: AdapterVersion | None) -> None:
        self._by_version[_key(version)] += 1
        self._metrics.observe_in_flight(self.num_requests)

    def leave(self, version: AdapterVersion | None) -> None:
        key = _key(version)
        self._by_version[key] -= 1
        if not self._by_version[key]:
            del self._by_version[key]
        self._metrics.observe_in_flight(self.num_requests)


def _key(version: AdapterVersion | None) -> tuple[str, str] | None:
    return None if version is None else (version.id, version.digest)
