"""`/admin/v1/adapters/{name}/versions/{number}/preload`, `/pin` and `/drain`."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from loramux.gateway.admin.bodies import Pin, PreloadTarget
from loramux.gateway.admin.operations import version_after
from loramux.gateway.admin.routing import admin_router
from loramux.gateway.admin.views import version_view
from loramux.gateway.deps import ServicesDep

router = admin_router("/adapters/{name}/versions/{number}")


@router.post("/preload")
async def preload(services: ServicesDep, response: Response, name: str, number: int, body: PreloadTarget | None = None) -> dict[str, Any]:
    """Have every engine load it, now and whenever one starts. It may be evicted again."""
    version = await services.registry.get_version(name, number)
    work = services.placing.place(version, (body or PreloadTarget()).tier, pinned=False)
    return await version_after(services, response, "preload", version, work)


@router.post("/pin")
async def pin(services: ServicesDep, response: Response, name: str, number: int, body: Pin | None = None) -> dict[str, Any]:
    """As `preload`, and keep it there; with `pinned` false, leave it to be evicted."""
    asked = body or Pin()
    version = await services.registry.get_version(name, number)
    if asked.pinned:
        return await version_after(services, response, "pin", version, services.placing.place(version, asked.tier, pinned=True))
    await services.placing.unpin(version)
    return version_view(services, version)


@router.post("/drain")
async def drain(services: ServicesDep, name: str, number: int) -> dict[str, Any]:
    """Refuse new requests for it, and free it on engines once those in flight have ended. Registering it again makes it ready."""
    version = await services.registry.drain(name, number)
    await services.adapter_bytes.free_after_change()
    return version_view(services, version)
