from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.gateway.admin.adapters import write_adapter
from tests.gateway.served import Served, error_of


async def test_the_life_of_a_tenant(app: Served) -> None:
    made = await app.admin("POST", "/tenants", json={"id": "acme", "weight": 2})
    assert made.status_code == 201
    assert made.json() == {"id": "acme", "weight": 2.0, "created_at": pytest.approx(time.time(), abs=5), "salt_epoch": 1}
    error_of(await app.admin("POST", "/tenants", json={"id": "acme"}), 409, "conflict")
    assert (await app.admin("PATCH", "/tenants/acme", json={"weight": 0.5})).json()["weight"] == 0.5
    assert (await app.admin("POST", "/tenants/acme/rotate-salt")).json()["salt_epoch"] == 2
    assert [tenant["id"] for tenant in (await app.admin("GET", "/tenants")).json()["data"]] == ["acme"]
    assert (await app.admin("GET", "/tenants/acme")).json()["salt_epoch"] == 2
    deleted = await app.admin("DELETE", "/tenants/acme")
    assert (deleted.status_code, deleted.content) == (204, b"")
    error_of(await app.admin("GET", "/tenants/acme"), 404, "not_found")
    error_of(await app.admin("DELETE", "/tenants/acme"), 404, "not_found")


async def test_a_new_tenant_of_an_old_id_inherits_no_grant(app: Served) -> None:
    await app.new_key("acme")
    source = {"uri": f"file:{write_adapter(app.root / 'a')}"}
    registered = await app.admin("POST", "/adapters/a/versions", json={"base": "tiny", "source": source, "tenants": ["acme"]})
    assert registered.status_code == 201
    await app.admin("DELETE", "/tenants/acme")
    key = await app.new_key("acme")
    assert [model["id"] for model in (await app.call("GET", "/v1/models", key)).json()["data"]] == ["tiny"]


async def test_a_deleted_key_works_no_more(app: Served) -> None:
    key = await app.new_key("acme")
    assert (await app.call("GET", "/v1/models", key)).status_code == 200
    (listed,) = (await app.admin("GET", "/tenants/acme/keys")).json()["data"]
    assert listed["scopes"] == ["infer"] and listed["expires_at"] is None and listed["id"] in key
    assert set(listed) == {"id", "scopes", "created_at", "expires_at"}
    assert (await app.admin("DELETE", f"/tenants/acme/keys/{listed['id']}")).status_code == 204
    error = error_of(await app.call("GET", "/v1/models", key), 401, "invalid_api_key")
    assert key not in str(error)
    error_of(await app.admin("DELETE", f"/tenants/acme/keys/{listed['id']}"), 404, "not_found")


async def test_a_key_is_deleted_only_under_its_own_tenant(app: Served) -> None:
    key = await app.new_key("acme")
    await app.new_key("globex")
    (listed,) = (await app.admin("GET", "/tenants/acme/keys")).json()["data"]
    error_of(await app.admin("DELETE", f"/tenants/globex/keys/{listed['id']}"), 404, "not_found")
    assert (await app.call("GET", "/v1/models", key)).status_code == 200


async def test_a_key_expires(app: Served) -> None:
    expires_at = time.time() + 2
    key = await app.new_key("acme", expires_at=expires_at)
    assert (await app.call("GET", "/v1/models", key)).status_code == 200
    await asyncio.sleep(expires_at - time.time() + 0.01)
    error_of(await app.call("GET", "/v1/models", key), 401, "invalid_api_key")
    iso = await app.admin("POST", "/tenants/acme/keys", json={"scopes": ["infer"], "expires_at": "2099-01-01T00:00:00+00:00"})
    assert iso.json()["expires_at"] == 4070908800.0


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"scopes": ["root"]}, "invalid_request", "/scopes/0"),
        ({"scopes": ["infer", "adapters:write"]}, "unsupported_parameter", "/scopes/1"),
        ({"scopes": []}, "invalid_request", "/scopes"),
        ({"scopes": "infer"}, "invalid_request", "/scopes"),
        ({"scopes": ["infer"], "expires_at": "soon"}, "invalid_request", "/expires_at"),
        ({"scopes": ["infer"], "expires_at": 1000}, "invalid_request", "/expires_at"),
        ({"scopes": ["infer"], "expires_at": "2099-01-01T00:00:00"}, "invalid_request", "/expires_at"),
        ({"scope": ["infer"]}, "unsupported_parameter", "/scope"),
    ],
)
async def test_bad_keys(app: Served, body: dict[str, Any], code: str, param: str) -> None:
    await app.admin("POST", "/tenants", json={"id": "acme"})
    assert error_of(await app.admin("POST", "/tenants/acme/keys", json=body), 400, code)["param"] == param


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_request", "/id"),
        ({"id": 7}, "invalid_request", "/id"),
        ({"id": "A"}, "invalid_request", "/id"),
        ({"id": "admin"}, "invalid_request", "/id"),
        ({"id": "a", "weight": 0}, "invalid_request", "/weight"),
        ({"id": "a", "weight": "2"}, "invalid_request", "/weight"),
        ({"id": "a", "limits": {"rpm": 1}}, "unsupported_parameter", "/limits"),
        ([], "invalid_request", None),
        (None, "invalid_request", None),
    ],
)
async def test_bad_tenants(app: Served, body: Any, code: str, param: str | None) -> None:
    assert error_of(await app.admin("POST", "/tenants", json=body), 400, code)["param"] == param
    assert (await app.admin("GET", "/tenants")).json() == {"data": []}


@pytest.mark.parametrize("content", [b"", b"{", b'{"id": }', b"\xff", b'{"id": "a"' + b" " * 100])
async def test_bodies_that_are_not_json(app: Served, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(await app.admin("POST", "/tenants", content=content, headers=headers), 400, "invalid_request")


@pytest.mark.parametrize("header", ["If-Match", "Idempotency-Key"])
async def test_headers_that_would_not_be_honoured_are_refused(app: Served, header: str) -> None:
    response = await app.admin("POST", "/tenants", json={"id": "acme"}, headers={header: "x"})
    error_of(response, 400, "unsupported_parameter")
    error_of(await app.admin("GET", "/tenants/acme"), 404, "not_found")
