"""The whole application in this event loop, over a real Valkey and a fake engine, with a client of each kind of key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loramux.adapters.contents import ContentStore
from loramux.adapters.registry import Registry
from loramux.adapters.types import ModuleShape
from loramux.gateway.adapter_bytes import AdapterBytes
from loramux.gateway.app import create_app
from loramux.gateway.in_flight import InFlight
from loramux.gateway.metrics import Metrics
from loramux.gateway.operations import Operations
from loramux.gateway.placing import Placing
from loramux.gateway.services import Services
from loramux.gateway.settings import Settings
from loramux.gateway.store.client import Store, connect
from loramux.gateway.tenancy.store import TenantStore
from loramux.gateway.tokenizer import ChatTokenizer
from tests.fakes import FakeEngine, base_description, engine_info, hashed_tokens
from tests.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

ADMIN_KEY = "admin-key-of-these-tests-0123456789"
ANSWER_WITHIN_S = 0.5
"""After which a request that waits for a load is answered with its operation."""
MODULES = {f"model.layers.{layer}.self_attn.{name}": ModuleShape(16, 16) for layer in range(2) for name in ("q_proj", "v_proj")}


@dataclass
class Served:
    services: Services
    engine: FakeEngine
    root: Path
    """The adapter root."""
    http: httpx.AsyncClient
    """Without a key."""

    async def call(self, method: str, path: str, key: str | None = ADMIN_KEY, **kwargs: Any) -> httpx.Response:
        headers = {**({"authorization": f"Bearer {key}"} if key else {}), **kwargs.pop("headers", {})}
        return await self.http.request(method, path, headers=headers, **kwargs)

    async def admin(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return await self.call(method, f"/admin/v1{path}", **kwargs)

    async def new_key(self, tenant: str = "acme", scopes: tuple[str, ...] = ("infer",), **body: Any) -> str:
        """A key of the tenant, which is made if it does not exist."""
        await self.admin("POST", "/tenants", json={"id": tenant})
        response = await self.admin("POST", f"/tenants/{tenant}/keys", json={"scopes": list(scopes), **body})
        assert response.status_code == 201, response.text
        key: str = response.json()["key"]
        return key


@asynccontextmanager
async def served(store_url: str, directory: Path, **settings: Any) -> AsyncIterator[Served]:
    """What `directory` and the store hold is there again when a later call names the same."""
    root = directory / "root"
    root.mkdir(exist_ok=True)
    store = Store(connect(store_url), durable=True)
    tenants = TenantStore(store)
    await tenants.ensure_admin_key(ADMIN_KEY)
    if settings.get("no_auth"):
        await tenants.ensure_open_tenant()
    tokenizer = ChatTokenizer(write_tokenizer(directory, byte_level_tokenizer()))
    base = msgspec.structs.replace(base_description(tokenizer.vocab_size, (1,)), modules=MODULES)
    engine = FakeEngine(engine_info(base), lambda ids: tokenizer.decode(ids), hashed_tokens(256))
    registry, contents = Registry(store.client, durable=True), ContentStore(directory / "adapters")
    metrics = Metrics()
    metrics.watch_engine(engine)
    in_flight, operations = InFlight(metrics), Operations(ANSWER_WITHIN_S)
    adapter_bytes = AdapterBytes(contents, registry, engine, in_flight, directory, "embedded")
    services = Services(
        settings=Settings(model="tiny", data_dir=directory, adapter_root=[root], **settings),
        store=store,
        tenants=tenants,
        registry=registry,
        contents=contents,
        adapter_bytes=adapter_bytes,
        placing=Placing(engine, registry, adapter_bytes),
        engine=engine,
        tokenizer=tokenizer,
        metrics=metrics,
        in_flight=in_flight,
        operations=operations,
        served_model_name="tiny",
    )
    transport = httpx.ASGITransport(create_app(services))
    async with services.placing.kept(), httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Served(services, engine, root, http)
    await operations.close()
    await store.close()


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error object, after checking that it has the contract's form."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code
    assert error["message"] and error["type"] and "param" in error
    assert error["request_id"] == response.headers["x-request-id"]
    assert (status in (429, 503)) == ("retry-after" in response.headers)
    return error
