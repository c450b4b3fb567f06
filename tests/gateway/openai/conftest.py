from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
import uvloop

from loramux.adapters.registry import Registry
from loramux.adapters.types import RegistrationReport
from loramux.gateway.app import create_app
from loramux.gateway.in_flight import InFlight
from loramux.gateway.metrics import Metrics
from loramux.gateway.operations import Operations
from loramux.gateway.services import Services
from loramux.gateway.settings import Settings
from loramux.gateway.store.client import Store, connect
from loramux.gateway.tenancy.store import TenantStore
from loramux.gateway.tokenizer import ChatTokenizer
from tests.fakes import Behaviour, FakeEngine, base_description, engine_info, hashed_tokens, scripted_tokens
from tests.tiny_tokenizer import SPECIAL, byte_level_tokenizer, write_tokenizer
from tests.valkey import running_valkey

BASE = "tiny:base"
IM_END = SPECIAL.index("<|im_end|>")
DIGEST = {"tickets": "sha256:" + "1" * 64, "secret": "sha256:" + "2" * 64}


@dataclass
class Gateway:
    """A gateway on a socket, over a fake engine and a real store. `tickets` is granted to all, `secret` to globex."""

    url: str
    engine: FakeEngine
    services: Services
    keys: dict[str, str]
    """Of the tenants acme and globex, and `admin-only`: one of acme's without the scope `infer`."""
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    def client(self, tenant: str = "acme") -> openai.OpenAI:
        """Kept, and closed by the fixture. A name that is no tenant's is sent as a key."""
        if tenant not in self.clients:
            key = self.keys.get(tenant, tenant)
            self.clients[tenant] = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)
        return self.clients[tenant]

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.keys["acme"], max_retries=0, timeout=20)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.keys['acme']}"}, timeout=20, verify=False)

    def say(self, text: str) -> None:
        """Let every choice answer `text`, then end."""
        self.engine.source = scripted_tokens(self.services.tokenizer.encode(text, add_special_tokens=False), IM_END)

    def change_settings(self, **changes: Any) -> None:
        self.services.settings = self.services.settings.model_copy(update=changes)


@pytest.fixture(scope="session")
def running_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("gateway")
    with running_valkey() as store_url:
        keys = asyncio.run(_register(store_url))
        services = _services(directory, store_url)
        with Serving(services) as url:
            gateway = Gateway(url, services.engine, services, keys)  # type: ignore[arg-type]
            yield gateway
            for client in gateway.clients.values():
                client.close()


@pytest.fixture
def gateway(running_gateway: Gateway) -> Iterator[Gateway]:
    """Afterwards nothing is in flight, and every request has had exactly one terminal record."""
    engine, services = running_gateway.engine, running_gateway.services
    engine.revive()
    engine.behaviour, engine.source, engine.step_s = Behaviour(), hashed_tokens(256, avoid=range(len(SPECIAL))), 0.0
    engine.requests.clear()
    engine.ends.clear()
    settings = services.settings
    yield running_gateway
    services.settings, services.draining = settings, False
    wait_until(lambda: services.in_flight.num_requests == 0)
    assert engine.running == {}
    assert sorted(end.request_id for end in engine.ends) == sorted(request.id for request in engine.requests)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


async def _register(store_url: str) -> dict[str, str]:
    store = Store(connect(store_url), durable=False)
    registry, tenants = Registry(store.client), TenantStore(store)
    keys = {}
    for tenant_id in ("acme", "globex"):
        await tenants.create(tenant_id)
        _, keys[tenant_id] = await tenants.create_key(tenant_id, ["infer"])
    _, keys["admin-only"] = await tenants.create_key("acme", ["adapters:write"])
    base = base_description(400, ())
    for name, granted in (("tickets", ["*"]), ("secret", ["globex"])):
        report = RegistrationReport(
            digest=DIGEST[name], tensors_matched=2, tensors_total=2, modules=(), rank=8, ranks={}, scale=2.0, num_bytes=64, keys=()
        )
        await registry.register(name, base.digest, DIGEST[name], report, "upload", granted)
    await store.close()
    return keys


def _services(directory: Path, store_url: str) -> Services:
    tokenizer = ChatTokenizer(write_tokenizer(directory, byte_level_tokenizer()))
    store = Store(connect(store_url), durable=False)
    info = engine_info(base_description(tokenizer.vocab_size, (1, IM_END)))
    metrics = Metrics()
    decode: Callable[[Sequence[int]], str] = lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)  # noqa: E731
    return Services(
        settings=Settings(model="tiny"),
        store=store,
        tenants=TenantStore(store),
        registry=Registry(store.client),
        contents=None,  # type: ignore[arg-type]
        adapter_bytes=None,  # type: ignore[arg-type]
        placing=None,  # type: ignore[arg-type]
        engine=FakeEngine(info, decode, hashed_tokens(256)),
        tokenizer=tokenizer,
        metrics=metrics,
        in_flight=InFlight(metrics),
        operations=Operations(),
        served_model_name=BASE,
    )


class Serving:
    """uvicorn in a thread, on a free port."""

    def __init__(self, services: Services) -> None:
        config = uvicorn.Config(create_app(services), port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=2)
        self._server, self._store = uvicorn.Server(config), services.store
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))

    def __enter__(self) -> str:
        self._thread.start()
        wait_until(lambda: self._server.started, timeout_s=20)
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _serve(self) -> None:
        try:
            await self._server.serve()
        finally:
            await self._store.close()
