"""What admin routes tell of adapters, engines and operations."""

from __future__ import annotations

from typing import Any

import msgspec

from loramux.adapters.registry import AdapterRecord
from loramux.adapters.types import AdapterVersion
from loramux.engine.types import AdapterResidency, EngineInfo
from loramux.gateway.operations import Operation
from loramux.gateway.services import Services


def version_view(services: Services, version: AdapterVersion) -> dict[str, Any]:
    """The version, where engines have its content, and how many requests it is answering here."""
    return {
        "id": version.id,
        **msgspec.to_builtins(version),
        "rank": version.report.rank,
        "bytes": version.report.num_bytes,
        "placements": _placements(services, version.digest),
        "in_flight": services.in_flight.num_of(version),
    }


def record_view(services: Services, record: AdapterRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "aliases": record.aliases,
        "tenants": list(record.grants),
        "versions": [version_view(services, version) for version in record.versions],
    }


def engine_view(services: Services, info: EngineInfo) -> dict[str, Any]:
    """Description, latest gauges and adapters. The base's modules are only counted: there are hundreds."""
    described: dict[str, Any] = msgspec.to_builtins(info)
    described["base"]["modules"] = len(info.base.modules)
    adapters = [msgspec.structs.asdict(each) for each in services.engine.residency.values()]
    return {**described, "stats": msgspec.to_builtins(services.engine.stats), "adapters": adapters}


def operation_view(operation: Operation) -> dict[str, Any]:
    failure = operation.failure
    return {
        "id": operation.id,
        "kind": operation.kind,
        "target": operation.target,
        "state": operation.state,
        "error": None if failure is None else {"code": failure.code, "message": failure.message},
    }


def _placements(services: Services, digest: str) -> list[dict[str, Any]]:
    info, residency = services.engine.info, services.engine.residency.get(digest)
    return [] if info is None or residency is None else [_placement(info.engine_id, residency)]


def _placement(engine_id: str, residency: AdapterResidency) -> dict[str, Any]:
    return {"engine": engine_id, "tier": residency.tier, "state": residency.state, "pinned": residency.pinned}
