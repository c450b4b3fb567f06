from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from loramux.engine.types import GenerationRequest, RequestEnd, SamplingParams
from loramux.gateway.metrics import MAX_LABEL_VALUES, OTHER, BoundedLabel, Metrics
from tests.fakes import FakeEngine, base_description, engine_info, hashed_tokens


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.expose().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def end(number: int) -> RequestEnd:
    return RequestEnd(str(number), "finished", num_prompt_tokens=10, num_cached_tokens=4, num_completion_tokens=3)


def test_tokens_by_tenant_and_adapter() -> None:
    metrics = Metrics()
    metrics.observe_ends([end(1), end(2)], tenant="acme", adapter=None)
    metrics.observe_ends([end(3)], tenant="acme", adapter="tickets")
    found = samples(metrics)
    assert found["loramux_tokens_total", (("adapter", "base"), ("kind", "prompt"), ("tenant", "acme"))] == 20
    assert found["loramux_tokens_total", (("adapter", "tickets"), ("kind", "cached"), ("tenant", "acme"))] == 4
    assert found["loramux_tokens_total", (("adapter", "tickets"), ("kind", "completion"), ("tenant", "acme"))] == 3
    assert found["loramux_generations_total", (("end", "finished"),)] == 3


def test_labels_are_bounded_in_number() -> None:
    metrics = Metrics()
    for number in range(MAX_LABEL_VALUES + 50):
        metrics.observe_ends([end(number)], tenant=f"t{number}", adapter=f"a{number}")
    found = {labels: value for (name, labels), value in samples(metrics).items() if name == "loramux_tokens_total"}
    assert len({dict(labels)["tenant"] for labels in found}) == MAX_LABEL_VALUES + 1
    assert found[("adapter", OTHER), ("kind", "prompt"), ("tenant", OTHER)] == 500


def test_a_value_seen_in_time_stays() -> None:
    label = BoundedLabel(limit=2)
    assert [label(value) for value in ("a", "b", "c", "a", "c")] == ["a", "b", OTHER, "a", OTHER]


def test_requests_by_route_and_class_of_status() -> None:
    metrics = Metrics()
    for status in (200, 201, 404, 503):
        metrics.observe_request("/v1/models", status, 0.2)
    found = samples(metrics)
    assert found["loramux_requests_total", (("route", "/v1/models"), ("status", "2xx"))] == 2
    assert found["loramux_requests_total", (("route", "/v1/models"), ("status", "4xx"))] == 1
    assert found["loramux_request_duration_seconds_count", (("route", "/v1/models"),)] == 4


async def test_the_engines_gauges_are_read_at_each_scrape() -> None:
    metrics = Metrics()
    engine = FakeEngine(engine_info(base_description(300, ())), lambda ids: "", hashed_tokens(300))
    metrics.watch_engine(engine)
    assert samples(metrics)["loramux_engine_requests_running", ()] == 0
    generation = engine.submit(GenerationRequest("one", "acme", "k", (1, 2), SamplingParams(max_tokens=3, seed=0), b"salt"))
    assert samples(metrics)["loramux_engine_requests_running", ()] == 1
    assert (await generation.ended()).end == "finished"
    assert samples(metrics)["loramux_engine_requests_running", ()] == 0
    assert samples(metrics)["loramux_engine_completion_tokens_total", ()] == 3


async def test_adapters_are_counted_by_tier_and_state_alone() -> None:
    metrics = Metrics()
    engine = FakeEngine(engine_info(base_description(300, ())), lambda ids: "", hashed_tokens(300))
    metrics.watch_engine(engine)

    def adapters() -> dict[str, float]:
        found = {
            dict(labels)["tier"] + " " + dict(labels)["state"]: value
            for (name, labels), value in samples(metrics).items()
            if name == "loramux_engine_adapters"
        }
        assert len(found) == 9
        return {name: value for name, value in found.items() if value}

    assert adapters() == {}
    for number in range(200):
        await engine.place(f"sha256:{number}", "device" if number % 4 == 0 else "host")
    assert adapters() == {"host ready": 150, "device ready": 50}
    engine.drop("sha256:0")
    assert adapters() == {"host ready": 150, "device ready": 49}
