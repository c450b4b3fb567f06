"""Who may not use the admin routes learns nothing else, and none of what it sends is read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from loramux.gateway.admin import adapters, engines, keys, operations, placements, tenants
from loramux.gateway.admin.routing import AdminRoute
from tests.gateway.served import Served, error_of

MODULES = (adapters, engines, keys, operations, placements, tenants)
ROUTES = [
    (method, route.path.format(tenant_id="acme", key_id="k", name="a", number="x", alias="prod", operation_id="op"))
    for module in MODULES
    for route in module.router.routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods)
]


async def _unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


def test_every_admin_route_is_guarded() -> None:
    assert len(ROUTES) == 22
    assert all(isinstance(route, AdminRoute) for module in MODULES for route in module.router.routes)


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=" ".join)
async def test_the_key_comes_before_the_rest_of_a_request(app: Served, method: str, path: str) -> None:
    """`x` is no number of a version, `?x=1` no parameter, and the body is never asked for."""
    tenants_key = await app.new_key("acme")
    request: dict[str, Any] = {"params": {"x": "1"}, "headers": {"content-type": "application/json", "if-match": "x"}}
    for key, status, code in ((None, 401, "invalid_api_key"), ("wrong", 401, "invalid_api_key"), (tenants_key, 403, "insufficient_scope")):
        error_of(await app.call(method, path, key, content=_unread(), **request), status, code)
    error_of(
        await app.call(method, path, content=b"{", **request),
        400,
        "invalid_request" if _has_body(method, path) else "unsupported_parameter",
    )


def _has_body(method: str, path: str) -> bool:
    return method in ("PUT", "PATCH") or (method == "POST" and not path.endswith(("/rotate-salt", "/versions", "/drain")))


async def test_a_malformed_body_without_a_key(app: Served) -> None:
    headers = {"content-type": "application/json"}
    error_of(await app.call("POST", "/admin/v1/tenants", None, content=b"{", headers=headers), 401, "invalid_api_key")
    error_of(
        await app.call("POST", "/admin/v1/tenants", await app.new_key(), content=json.dumps([]), headers=headers), 403, "insufficient_scope"
    )
