"""Every route: who may call it, and what it answers when the store is gone."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from loramux.gateway.app import create_routes
from tests.gateway.admin.adapters import write_adapter
from tests.gateway.served import ADMIN_KEY, Served, error_of, served
from tests.valkey import running_valkey

OPEN = {"/health/live", "/health/ready", "/version", "/metrics"}


def _routes(app: Served) -> Iterator[tuple[str, str]]:
    """(method, path with its parameters filled in)"""
    pending, found = list(create_routes(app.services).routes), []
    while pending:
        route = pending.pop()
        if isinstance(route, APIRoute):
            found.append(route)
        else:
            pending += getattr(getattr(route, "original_router", route), "routes", [])
    values = {"tenant_id": "acme", "key_id": "acme.00000000", "name": "tickets", "number": "1", "alias": "prod"}
    for route in found:
        for method in sorted(route.methods - {"HEAD"}):
            yield method, re.sub(r"{(\w+)(:\w+)?}", lambda match: values.get(match[1], "x"), route.path)


async def test_every_route_asks_for_its_scope(app: Served) -> None:
    infer, none = await app.new_key("acme"), None
    seen = set()
    for method, path in _routes(app):
        seen.add((method, path))
        if path in OPEN:
            assert (await app.call(method, path, none)).status_code == 200
            continue
        for key in (none, "lmx_acme.00000000_" + "f" * 64, infer + "0", "Bearer"):
            error_of(await app.call(method, path, key, json={}), 401, "invalid_api_key")
        wrong = infer if path.startswith("/admin/") else ADMIN_KEY
        error_of(await app.call(method, path, wrong, json={}), 403, "insufficient_scope")
    assert len(seen) > 20 and ("POST", "/v1/chat/completions") in seen and ("GET", "/admin/v1/engines") in seen


async def test_a_tenants_key_with_the_scope_admin_is_the_operators(app: Served) -> None:
    key = await app.new_key("acme", ("admin", "infer"))
    assert (await app.call("GET", "/admin/v1/tenants", key)).status_code == 200
    assert (await app.call("GET", "/v1/models", key)).status_code == 200


async def test_no_key_and_no_salt_reaches_a_log_or_an_answer(app: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = await app.new_key("acme")
    salt = (await app.services.tenants.authenticate(key)).salt
    write_adapter(app.root / "one")
    answers = [
        await app.call("GET", f"/v1/models?api_key={key}", key),
        await app.call("POST", "/admin/v1/tenants", key, json={"id": key, key: key}),
        await app.call("POST", "/admin/v1/tenants", json={"id": key, "weight": key}),
        await app.call("POST", "/admin/v1/tenants/acme/keys", json={"scopes": [key], "expires_at": key}),
        await app.call("GET", "/v1/models", key + "x"),
        await app.call("GET", "/v1/models", None, headers={"authorization": f"Basic {key}"}),
        await app.call("GET", "/v1/models", key, headers={"x-client-request-id": key}),
        await app.call("GET", "/v1/models", key, headers={"x-client-request-id": f"job:{key}"}),
        await app.admin("DELETE", f"/tenants/acme/keys/{key}"),
        await app.admin("GET", "/tenants/acme"),
        await app.admin("GET", "/tenants/acme/keys"),
    ]
    lines = " ".join(repr(vars(record)) for record in caplog.records if not record.name.startswith("httpx"))
    assert "request" in lines and "acme." in lines
    for secret in (key, key.rpartition("_")[2], ADMIN_KEY, salt.hex(), repr(salt)):
        assert secret not in lines
        assert all(secret not in answer.text + repr(answer.headers) for answer in answers)
    assert repr(salt) not in repr(await app.services.tenants.authenticate(key))


async def test_when_the_store_dies_every_route_says_so_at_once(tmp_path: Path) -> None:
    with running_valkey(tmp_path / "valkey", append_only=True) as url:
        context = served(url, tmp_path)
        app = await context.__aenter__()
        key = await app.new_key("acme")
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/admin/v1/tenants"),
        ("POST", "/admin/v1/tenants"),
    ):
        started = time.monotonic()
        body = {"id": "globex"} if method == "POST" else None
        error_of(await app.call(method, path, ADMIN_KEY if "admin" in path else key, json=body), 503, "store_unavailable")
        assert time.monotonic() - started < 2
    assert (await app.call("GET", "/health/live", None)).status_code == 200
    assert (await app.call("GET", "/health/ready", None)).status_code == 503
    await context.__aexit__(None, None, None)


async def test_without_auth_there_is_one_open_tenant_and_admin_stays_closed(store_url: str, tmp_path: Path) -> None:
    async with served(store_url, tmp_path, no_auth=True) as app:
        for key in (None, "anything"):
            assert [model["id"] for model in (await app.call("GET", "/v1/models", key)).json()["data"]] == ["tiny"]
        error_of(await app.call("GET", "/admin/v1/tenants", None), 401, "invalid_api_key")
        write_adapter(app.root / "one")
        body = {"base": "tiny", "source": {"uri": f"file:{app.root / 'one'}"}, "tenants": ["open"]}
        assert (await app.admin("POST", "/adapters/one/versions", json=body)).status_code == 201
        assert [model["id"] for model in (await app.call("GET", "/v1/models", None)).json()["data"]] == ["tiny", "tiny:one"]


async def test_unknown_routes_and_methods(app: Served) -> None:
    error_of(await app.call("GET", "/v2/models"), 404, "not_found")
    error_of(await app.call("DELETE", "/v1/models"), 405, "method_not_allowed")
    error_of(await app.call("GET", "/docs"), 404, "not_found")
    error_of(await app.call("GET", "/admin/v1/tenants/"), 404, "not_found")
    error_of(await app.call("GET", "/openapi.json"), 404, "not_found")


async def test_cors_only_where_it_is_set(store_url: str, tmp_path: Path) -> None:
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with served(store_url, tmp_path) as app:
        assert "access-control-allow-origin" not in (await app.call("OPTIONS", "/v1/models", None, headers=preflight)).headers
    async with served(store_url, tmp_path, cors_origin=["https://app.example"]) as app:
        allowed = await app.call("OPTIONS", "/v1/models", None, headers=preflight)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert allowed.headers["x-request-id"]
        other = await app.call("OPTIONS", "/v1/models", None, headers={**preflight, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
