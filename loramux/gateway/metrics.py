"""Prometheus metrics of the gateway, and the engine's gauges as it last published them. Names begin with `loramux_`.

Labels that clients or tenants choose are bounded in number: what comes after the first `MAX_LABEL_VALUES` is counted as `other`.
"""

from __future__ import annotations

import time
from collections import Counter as Multiset
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.engine.interface import Engine
from loramux.engine.types import AdapterResidency, RequestEnd

MAX_LABEL_VALUES = 100
OTHER = "other"
BASE = "base"
"""The adapter label of requests to the base alone."""

_NO_STATUS = 500
"""Of a request that ended without one."""
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_DURATION_S = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class BoundedLabel:
    """Lets the first `limit` distinct values through; the rest are `other`."""

    def __init__(self, limit: int = MAX_LABEL_VALUES) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._seen:
            if len(self._seen) >= self._limit:
                return OTHER
            self._seen.add(value)
        return value


class ObserveRequests:
    """Pure ASGI, outermost: counts and times every request by its route's template."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, started = _NO_STATUS, time.monotonic()

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_observed)
        finally:
            route = getattr(scope.get("route"), "path", OTHER)
            self.metrics.observe_request(route, status, time.monotonic() - started)
        return None


class Metrics:
    """One per gateway process, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tenant, self._adapter = BoundedLabel(), BoundedLabel()
        self._requests = self._counter("requests", "HTTP requests answered, by route and class of status.", ("route", "status"))
        self._tokens = self._counter(
            "tokens", "Tokens, by kind: prompt, cached (of the prompt), completion.", ("kind", "tenant", "adapter")
        )
        self._ends = self._counter("generations", "Terminal records of generations, by how they ended.", ("end",))
        self._in_flight = Gauge("loramux_requests_in_flight", "Requests being answered.", registry=self.registry)
        self._first_token = self._histogram("time_to_first_token_seconds", "From the request's arrival to its first token.", _FIRST_TOKEN_S)
        self._between = self._histogram("inter_token_seconds", "Between two deltas of a choice.", _BETWEEN_TOKENS_S)
        self._duration = self._histogram("request_duration_seconds", "From arrival to the last byte.", _DURATION_S, ("route",))

    def watch_engine(self, engine: Engine) -> None:
        """Publish the engine's gauges and counters, read at each scrape."""
        self.registry.register(_EngineCollector(engine))

    def observe_request(self, route: str, status: int, duration_s: float) -> None:
        """`route` is the path's template, never the path."""
        self._requests.labels(route, f"{status // 100}xx").inc()
        self._duration.labels(route).observe(duration_s)

    def observe_in_flight(self, num_requests: int) -> None:
        self._in_flight.set(num_requests)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_between_tokens(self, seconds: float) -> None:
        self._between.observe(seconds)

    def observe_ends(self, ends: Sequence[RequestEnd], *, tenant: str, adapter: str | None) -> None:
        labels = self._tenant(tenant), self._adapter(adapter or BASE)
        for end in ends:
            self._ends.labels(end.end).inc()
            self._tokens.labels("prompt", *labels).inc(end.num_prompt_tokens)
            self._tokens.labels("cached", *labels).inc(end.num_cached_tokens)
            self._tokens.labels("completion", *labels).inc(end.num_completion_tokens)

    def expose(self) -> bytes:
        """The text format, version 0.0.4."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"loramux_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"loramux_{name}", text, labels, buckets=buckets, registry=self.registry)


_ENGINE_GAUGES = {
    "num_running": ("requests_running", "Requests that hold blocks."),
    "num_waiting": ("requests_waiting", "Requests that hold nothing yet."),
    "num_blocks_used": ("kv_blocks_used", "KV blocks held by sequences."),
    "num_blocks_cached": ("kv_blocks_cached", "KV blocks in the prefix cache that nobody holds."),
    "num_slots_used": ("adapter_slots_used", "Adapter slots held by running sequences."),
    "num_host_adapters": ("host_adapters", "Adapters in host memory."),
    "host_adapter_bytes": ("host_adapter_bytes", "Bytes of adapters in host memory."),
    "num_adapters_loading": ("adapters_loading", "Adapters on their way to host memory."),
    "num_grammars": ("grammars", "Grammar matchers held by sequences."),
}
_ENGINE_COUNTERS = {
    "num_steps": ("steps", "Steps since the engine started."),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens since the engine started."),
    "num_cached_tokens": ("cached_tokens", "Prompt tokens read from the prefix cache."),
    "num_completion_tokens": ("completion_tokens", "Tokens generated."),
    "num_preemptions": ("preemptions", "Sequences preempted and recomputed later."),
    "num_adapter_loads": ("adapter_loads", "Adapters loaded into host memory."),
    "num_adapter_evictions": ("adapter_evictions", "Adapters that left host memory, for room or because they were dropped."),
    "num_slot_turns": ("adapter_slot_turns", "Slots taken from an adapter in use, for one that had waited."),
}


_TIERS = ("none", "host", "device")
_STATES = ("ready", "loading", "draining")


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield _adapters_by_tier(self._engine.residency.values())
        stats: Any = self._engine.stats
        for field, (name, text) in _ENGINE_GAUGES.items():
            yield GaugeMetricFamily(f"loramux_engine_{name}", text, value=getattr(stats, field))
        for field, (name, text) in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"loramux_engine_{name}", text, value=getattr(stats, field))


def _adapters_by_tier(residencies: Iterable[AdapterResidency]) -> Metric:
    family = GaugeMetricFamily("loramux_engine_adapters", "Adapters that the engine has or loads.", labels=("tier", "state"))
    found: Multiset[tuple[str, str]] = Multiset((residency.tier, residency.state) for residency in residencies)
    for tier in _TIERS:
        for state in _STATES:
            family.add_metric((tier, state), found[tier, state])
    return family
