"""Waiting sequences, shared fairly among tenants: start-time fair queueing over served tokens (Goyal, Vin, Cheng, 1996).

Each tenant has a virtual time: the tokens served to it over its weight. The tenant that is furthest behind goes first. A tenant that
was idle starts at the clock, the virtual time of whoever was picked last, so that idleness earns no credit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass
class _Tenant(Generic[Item]):
    weight: float
    virtual_time: float
    num_active: int = 0
    """Items waiting or running. A tenant without any is forgotten once the clock has passed its virtual time."""
    waiting: list[tuple[int, int, int, Item]] = field(default_factory=list)
    """Heap of (priority, arrival, tie, item)."""


class FairQueue(Generic[Item]):
    """Within a tenant, items go by (priority, arrival), lower first."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[Item]] = {}
        self._clock = 0.0
        self._ties = itertools.count()

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    def __iter__(self) -> Iterator[Item]:
        """Every waiting item, in no order."""
        return (entry[3] for tenant in self._tenants.values() for entry in tenant.waiting)

    def enter(self, tenant_id: str, weight: float) -> None:
        """An item of this tenant now exists, waiting or running; balanced by `leave`."""
        tenant = self._tenants.setdefault(tenant_id, _Tenant(weight, self._clock))
        if not tenant.num_active:
            tenant.virtual_time = max(tenant.virtual_time, self._clock)
        tenant.weight = weight
        tenant.num_active += 1

    def leave(self, tenant_id: str) -> None:
        self._tenants[tenant_id].num_active -= 1
        settled = [key for key, tenant in self._tenants.items() if not tenant.num_active and tenant.virtual_time <= self._clock]
        for key in settled:
            del self._tenants[key]

    def push(self, tenant_id: str, priority: int, arrival: int, item: Item) -> None:
        heapq.heappush(self._tenants[tenant_id].waiting, (priority, arrival, next(self._ties), item))

    def remove(self, tenant_id: str, item: Item) -> bool:
        """False if the item does not wait."""
        waiting = self._tenants[tenant_id].waiting
        others = [entry for entry in waiting if entry[3] is not item]
        was_waiting = len(others) < len(waiting)
        waiting[:] = others
        heapq.heapify(waiting)
        return was_waiting

    def charge(self, tenant_id: str, num_tokens: int) -> None:
        """Count tokens served to an active tenant."""
        behind = min(tenant.virtual_time for tenant in self._tenants.values() if tenant.num_active)
        self._clock = max(self._clock, behind)
        tenant = self._tenants[tenant_id]
        tenant.virtual_time += num_tokens / tenant.weight

    def virtual_time(self, tenant_id: str) -> float:
        return self._tenants[tenant_id].virtual_time

    def in_order(self) -> Iterator[Item]:
        """Every waiting item: the tenant furthest behind first, one item of each tenant before a second of any.

        Works on a copy, lazily, so the caller may remove items as it goes.
        """
        tenants = sorted((tenant for tenant in self._tenants.values() if tenant.waiting), key=lambda tenant: tenant.virtual_time)
        heaps = [tenant.waiting.copy() for tenant in tenants]
        while heaps:
            for heap in heaps:
                yield heapq.heappop(heap)[3]
            heaps = [heap for heap in heaps if heap]
