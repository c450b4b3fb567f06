from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loramux.adapters.contents import Contents, ContentStore
from loramux.adapters.identity import content_digest
from loramux.adapters.registry import Registry
from loramux.errors import StoreUnavailable
from loramux.gateway.adapter_bytes import AdapterBytes
from loramux.gateway.in_flight import InFlight
from loramux.gateway.metrics import Metrics
from loramux.gateway.store.client import Store, connect
from tests.fakes import FakeEngine, base_description, engine_info, hashed_tokens
from tests.gateway.admin.adapters import write_adapter
from tests.gateway.served import Served


def _contents(adapter: Path) -> Contents:
    return Contents(*((adapter / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")))


async def _register(app: Served, directory: Path, name: str) -> str:
    body = {"base": "tiny", "source": {"uri": f"file:{directory}"}}
    response = await app.admin("POST", f"/adapters/{name}/versions", json=body)
    assert response.status_code == 201, response.text
    digest: str = response.json()["digest"]
    return digest


async def test_bytes_that_no_version_names_are_freed_unless_another_store_may_name_them(store_url: str, tmp_path: Path) -> None:
    found = _contents(write_adapter(tmp_path / "one"))
    digest = content_digest(*found)
    store, contents = Store(connect(store_url), durable=False), ContentStore(tmp_path / "adapters")
    registry = Registry(store.client)
    engine, in_flight = FakeEngine(engine_info(base_description(300, ())), lambda ids: "", hashed_tokens(300)), InFlight(Metrics())
    for url, left in (("embedded", set()), (store_url, {digest}), ("embedded", {digest})):
        contents.put(digest, *found)
        await AdapterBytes(contents, registry, engine, in_flight, tmp_path, url).free()
        assert contents.digests() == left
    await store.close()


async def test_deleting_the_last_version_that_names_bytes_frees_them(app: Served) -> None:
    stored = app.services.contents.digests
    first = await _register(app, write_adapter(app.root / "one", seed=1), "a")
    second = await _register(app, write_adapter(app.root / "two", seed=2), "a")
    assert await _register(app, app.root / "two", "b") == second
    assert (await app.admin("DELETE", "/adapters/a/versions/2")).status_code == 204
    assert stored() == {first, second}
    assert (await app.admin("DELETE", "/adapters/b")).status_code == 204
    assert stored() == {first}
    assert (await app.admin("DELETE", "/adapters/a")).status_code == 204
    assert stored() == set()


async def test_registering_and_deleting_the_same_bytes_at_a_time_leaves_every_version_its_bytes(app: Served) -> None:
    directory = write_adapter(app.root / "one")

    async def come_and_go(name: str) -> None:
        for _ in range(8):
            digest = await _register(app, directory, name)
            assert app.services.contents.verify(digest)
            assert (await app.admin("DELETE", f"/adapters/{name}")).status_code == 204

    await asyncio.gather(*(come_and_go(name) for name in "abcd"))
    assert app.services.contents.digests() == set()


async def test_a_deletion_succeeds_though_the_bytes_stay(app: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> frozenset[str]:
        raise StoreUnavailable("The store did not answer.")

    digest = await _register(app, write_adapter(app.root / "one"), "a")
    monkeypatch.setattr(app.services.registry, "digests", fail)
    assert (await app.admin("DELETE", "/adapters/a")).status_code == 204
    assert app.services.contents.digests() == {digest}
