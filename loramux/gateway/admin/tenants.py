"""`/admin/v1/tenants`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from loramux.gateway.admin.bodies import NewTenant, TenantChange
from loramux.gateway.admin.routing import admin_router
from loramux.gateway.deps import ServicesDep

router = admin_router("/tenants")


@router.post("", status_code=201)
async def create_tenant(services: ServicesDep, body: NewTenant) -> dict[str, Any]:
    return asdict(await services.tenants.create(body.id, body.weight))


@router.get("")
async def list_tenants(services: ServicesDep) -> dict[str, Any]:
    return {"data": [asdict(tenant) for tenant in await services.tenants.list()]}


@router.get("/{tenant_id}")
async def get_tenant(services: ServicesDep, tenant_id: str) -> dict[str, Any]:
    return asdict(await services.tenants.get(tenant_id))


@router.patch("/{tenant_id}")
async def change_tenant(services: ServicesDep, tenant_id: str, body: TenantChange) -> dict[str, Any]:
    return asdict(await services.tenants.set_weight(tenant_id, body.weight))


@router.delete("/{tenant_id}", status_code=204)
async def delete_tenant(services: ServicesDep, tenant_id: str) -> None:
    """A later tenant of the same id inherits no grants: they go first, lest a crash leave any, and last, lest one came meanwhile."""
    await services.tenants.get(tenant_id)
    await services.registry.revoke(tenant_id)
    await services.tenants.delete(tenant_id)
    await services.registry.revoke(tenant_id)


@router.post("/{tenant_id}/rotate-salt")
async def rotate_salt(services: ServicesDep, tenant_id: str) -> dict[str, Any]:
    return asdict(await services.tenants.rotate_salt(tenant_id))
