"""`/admin/v1/tenants/{t}/keys`."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import datetime
from typing import Any

from loramux.errors import InvalidRequest, UnsupportedParameter
from loramux.gateway.admin.bodies import NewKeyBody
from loramux.gateway.admin.routing import admin_router
from loramux.gateway.deps import ServicesDep
from loramux.gateway.tenancy.keys import SCOPES, SCOPES_NOT_BUILT

router = admin_router("/tenants/{tenant_id}/keys")


@router.post("", status_code=201)
async def create_key(services: ServicesDep, tenant_id: str, body: NewKeyBody) -> dict[str, Any]:
    """The answer alone holds the key; it is not shown again."""
    _check_scopes(body.scopes)
    key, secret = await services.tenants.create_key(tenant_id, body.scopes, _expiry(body.expires_at))
    return {**asdict(key), "key": secret}


@router.get("")
async def list_keys(services: ServicesDep, tenant_id: str) -> dict[str, Any]:
    return {"data": [asdict(key) for key in await services.tenants.list_keys(tenant_id)]}


@router.delete("/{key_id}", status_code=204)
async def delete_key(services: ServicesDep, tenant_id: str, key_id: str) -> None:
    await services.tenants.delete_key(tenant_id, key_id)


def _check_scopes(scopes: list[str]) -> None:
    for index, scope in enumerate(scopes):
        if scope in SCOPES_NOT_BUILT:
            raise UnsupportedParameter(f"The scope {scope} is not supported yet.", param=f"/scopes/{index}")
        if scope not in SCOPES:
            raise InvalidRequest(f"A scope must be one of {', '.join(sorted(SCOPES))}.", param=f"/scopes/{index}")


def _expiry(moment: datetime | None) -> float | None:
    if moment is None:
        return None
    if moment.timestamp() <= time.time():
        raise InvalidRequest("This moment has passed.", param="/expires_at")
    return moment.timestamp()
