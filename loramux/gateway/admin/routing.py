"""The router of every admin route: the key is checked before anything else of a request is looked at."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from loramux.errors import UnsupportedParameter
from loramux.gateway.deps import authorise


class AdminRoute(APIRoute):
    """FastAPI reads and parses a body before it calls the first dependency, so the key can't be left to one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def authorised(request: Request) -> Response:
            await authorise(request, "admin")
            return await handle(request)

        return authorised


async def no_conditions(request: Request) -> None:
    """Conditional and idempotent requests would be answered as if they were not; better not at all."""
    for header in ("if-match", "if-none-match", "idempotency-key"):
        if header in request.headers:
            raise UnsupportedParameter(f"The header {header} is not supported yet.", param=header)
    for name in request.query_params:
        raise UnsupportedParameter(f"The query parameter {name} is not supported.", param=name)


def admin_router(path: str) -> APIRouter:
    """For routes under /admin/v1`path`."""
    return APIRouter(prefix=f"/admin/v1{path}", route_class=AdminRoute, dependencies=[Depends(no_conditions)])
