"""`/admin/v1/operations`, and the answer of a route whose work may take longer than a request."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fastapi import Response

from loramux.adapters.types import AdapterVersion
from loramux.gateway.admin.routing import admin_router
from loramux.gateway.admin.views import operation_view, version_view
from loramux.gateway.deps import ServicesDep
from loramux.gateway.services import Services

router = admin_router("/operations")


@router.get("/{operation_id}")
async def get_operation(services: ServicesDep, operation_id: str) -> dict[str, Any]:
    return operation_view(services.operations.get(operation_id))


async def version_after(
    services: Services, response: Response, kind: str, version: AdapterVersion, work: Coroutine[Any, Any, None]
) -> dict[str, Any]:
    """The version once the work on it is done; if that takes long, a 202 with the operation. The work goes on without its client."""
    operation = services.operations.start(kind, version.id, work)
    if await services.operations.answered(operation):
        return version_view(services, version)
    response.status_code = 202
    response.headers["location"] = f"/admin/v1/operations/{operation.id}"
    return operation_view(operation)
