from __future__ import annotations

from loramux.engine.fair_queue import FairQueue


def _serve(queue: FairQueue[str], num_picks: int, cost: int = 1) -> list[str]:
    """Pick the head, charge its tenant, put the item back."""
    picks = []
    for arrival in range(num_picks):
        item = next(iter(queue.in_order()))
        queue.remove(item, item)
        queue.charge(item, cost)
        queue.push(item, 0, 100 + arrival, item)
        picks.append(item)
    return picks


def test_tenants_share_by_weight() -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant, weight in (("light", 1.0), ("heavy", 3.0)):
        queue.enter(tenant, weight)
        queue.push(tenant, 0, 0, tenant)
    picks = _serve(queue, 400)
    assert abs(picks.count("heavy") - 300) <= 3


def test_idleness_earns_no_credit() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.enter("busy", 1.0)
    queue.push("busy", 0, 0, "busy")
    _serve(queue, 100)
    queue.enter("late", 1.0)
    queue.push("late", 0, 0, "late")
    assert 45 <= _serve(queue, 100).count("late") <= 55


def test_leaving_and_coming_back_sheds_no_debt() -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant in ("a", "b"):
        queue.enter(tenant, 1.0)
        queue.push(tenant, 0, 0, tenant)
    queue.charge("a", 1000)
    queue.remove("a", "a")
    queue.leave("a")
    queue.enter("a", 1.0)
    queue.push("a", 0, 0, "a")
    assert _serve(queue, 500) == ["b"] * 500


def test_priority_then_arrival_within_a_tenant_and_turns_between_tenants() -> None:
    queue: FairQueue[str] = FairQueue()
    for arrival, (tenant, priority) in enumerate([("t", 1), ("t", 0), ("t", 0), ("u", 9)]):
        queue.enter(tenant, 1.0)
        queue.push(tenant, priority, arrival, f"{tenant}{arrival}")
    assert list(queue.in_order()) == ["t1", "u3", "t2", "t0"]
