"""`/admin/v1/engines`."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter

from loramux.gateway.admin.bodies import NO_CONDITIONS
from loramux.gateway.deps import AdminPrincipal, ServicesDep

router = APIRouter(prefix="/admin/v1/engines", dependencies=NO_CONDITIONS)


@router.get("")
async def list_engines(principal: AdminPrincipal, services: ServicesDep) -> dict[str, Any]:
    """Engines that are ready, each with its description and its latest gauges. The base's modules are left out: there are hundreds."""
    info = services.engine.info
    if info is None:
        return {"data": []}
    described: dict[str, Any] = msgspec.to_builtins(info)
    described["base"]["modules"] = len(info.base.modules)
    return {"data": [{**described, "stats": msgspec.to_builtins(services.engine.stats)}]}
