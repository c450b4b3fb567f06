"""`/admin/v1/engines`."""

from __future__ import annotations

from typing import Any

from loramux.gateway.admin.routing import admin_router
from loramux.gateway.admin.views import engine_view
from loramux.gateway.deps import ServicesDep

router = admin_router("/engines")


@router.get("")
async def list_engines(services: ServicesDep) -> dict[str, Any]:
    """Engines that are ready."""
    info = services.engine.info
    return {"data": [] if info is None else [engine_view(services, info)]}
