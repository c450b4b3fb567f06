"""`/admin/v1/engines`."""

from __future__ import annotations

from typing import Any

import msgspec

from loramux.gateway.admin.routing import admin_router
from loramux.gateway.deps import ServicesDep

router = admin_router("/engines")


@router.get("")
async def list_engines(services: ServicesDep) -> dict[str, Any]:
    """Engines that are ready, each with its description and its latest gauges. The base's modules are left out: there are hundreds."""
    info = services.engine.info
    if info is None:
        return {"data": []}
    described: dict[str, Any] = msgspec.to_builtins(info)
    described["base"]["modules"] = len(info.base.modules)
    return {"data": [{**described, "stats": msgspec.to_builtins(services.engine.stats)}]}
