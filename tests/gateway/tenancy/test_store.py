from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loramux.errors import AuthenticationFailed, Conflict, InvalidRequest, NotFound, StoreUnavailable
from loramux.gateway.store.client import Store, connect
from loramux.gateway.tenancy.store import TenantStore
from tests.valkey import running_valkey

GIVEN = "a-key-given-by-the-operator"


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    store = Store(connect(store_url), durable=True)
    yield store
    await store.close()


@pytest.fixture
def tenants(store: Store) -> TenantStore:
    return TenantStore(store)


async def _stored_text(store: Store) -> str:
    """Everything in the store."""
    parts = []
    for key in await store.client.keys("*"):
        kind = (await store.client.type(key)).decode()
        read = {"string": store.client.get, "hash": store.client.hgetall, "set": store.client.smembers}[kind]
        parts.append(repr(await read(key)))
    return " ".join(parts)


async def test_a_key_is_good_until_it_is_deleted(tenants: TenantStore, store: Store) -> None:
    await tenants.create("acme", 2.5)
    key, secret = await tenants.create_key("acme", ["infer"])
    principal = await tenants.authenticate(secret)
    assert (principal.tenant_id, principal.key_id, principal.scopes, principal.weight) == ("acme", key.id, {"infer"}, 2.5)
    assert len(principal.salt) == 32
    assert secret not in await _stored_text(store)
    await tenants.delete_key("acme", key.id)
    with pytest.raises(AuthenticationFailed):
        await tenants.authenticate(secret)
    with pytest.raises(NotFound):
        await tenants.delete_key("acme", key.id)


async def test_every_wrong_key_is_refused_alike(tenants: TenantStore) -> None:
    await tenants.create("acme")
    _, expired = await tenants.create_key("acme", ["infer"], expires_at=time.time() - 1)
    _, good = await tenants.create_key("acme", ["infer"], expires_at=time.time() + 60)
    assert (await tenants.authenticate(good)).tenant_id == "acme"
    wrong = [expired, good[:-1] + ("0" if good[-1] != "0" else "1"), good.replace("acme", "other"), good.upper(), "", "x", good + " "]
    messages = set()
    for key in wrong:
        with pytest.raises(AuthenticationFailed) as caught:
            await tenants.authenticate(key)
        messages.add(caught.value.message)
    assert len(messages) == 1 and good not in messages.pop()


async def test_deleting_a_tenant_deletes_its_keys_and_its_salt(tenants: TenantStore, store: Store) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme", ["infer"])
    before = (await tenants.authenticate(secret)).salt
    await tenants.delete("acme")
    assert await store.client.keys("{t:acme}*") == [] and list(await tenants.list()) == []
    await tenants.create("acme")
    with pytest.raises(AuthenticationFailed):
        await tenants.authenticate(secret)
    _, again = await tenants.create_key("acme", ["infer"])
    assert (await tenants.authenticate(again)).salt != before


async def test_rotating_the_salt_changes_it_for_that_tenant_alone(tenants: TenantStore) -> None:
    secrets = {}
    for tenant in ("acme", "globex"):
        await tenants.create(tenant)
        secrets[tenant] = (await tenants.create_key(tenant, ["infer"]))[1]

    async def salt(tenant: str) -> bytes:
        return (await tenants.authenticate(secrets[tenant])).salt

    acme, globex = await salt("acme"), await salt("globex")
    assert acme != globex and acme == await salt("acme")
    assert (await tenants.rotate_salt("acme")).salt_epoch == 2
    assert await salt("acme") != acme and await salt("globex") == globex


async def test_two_creations_at_once_make_one_tenant(tenants: TenantStore) -> None:
    results = await asyncio.gather(*(tenants.create("acme", weight) for weight in (1, 2, 3)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "Conflict", "Tenant"]
    assert [tenant.id for tenant in await tenants.list()] == ["acme"]


async def test_an_id_in_the_index_alone_counts_for_nothing(tenants: TenantStore, store: Store) -> None:
    await store.client.sadd("loramux:tenants", "ghost")
    assert list(await tenants.list()) == []
    await tenants.create("ghost")
    assert [tenant.id for tenant in await tenants.list()] == ["ghost"]


async def test_unknown_tenants(tenants: TenantStore) -> None:
    for work in (
        tenants.get("nobody"),
        tenants.set_weight("nobody", 1),
        tenants.rotate_salt("nobody"),
        tenants.delete("nobody"),
        tenants.create_key("nobody", ["infer"]),
        tenants.list_keys("nobody"),
        tenants.delete_key("nobody", "nobody.00000000"),
    ):
        with pytest.raises(NotFound):
            await work


async def test_the_admin_key_is_made_once_and_a_given_one_replaces_it(tenants: TenantStore, store: Store) -> None:
    made = await tenants.ensure_admin_key(None)
    assert made is not None and await tenants.ensure_admin_key(None) is None
    principal = await tenants.authenticate(made)
    assert (principal.tenant_id, principal.scopes) == ("", {"admin"})
    assert await tenants.ensure_admin_key(GIVEN) is None
    assert (await tenants.authenticate(GIVEN)).scopes == {"admin"}
    with pytest.raises(AuthenticationFailed):
        await tenants.authenticate(made)
    assert GIVEN not in await _stored_text(store)


async def test_without_an_admin_key_nobody_is_admin(tenants: TenantStore) -> None:
    for key in ("", "0" * 64):
        with pytest.raises(AuthenticationFailed):
            await tenants.authenticate(key)


@pytest.mark.parametrize(
    "given", ["short", "with spaces in between 123", "não-ascii-0123456789", "tab\tin-it-0123456789", f"lmx_acme.00000000_{'f' * 64}"]
)
async def test_an_admin_key_that_is_no_secret(tenants: TenantStore, given: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tenants.ensure_admin_key(given)
    assert given not in caught.value.message


async def test_tenants_and_keys_survive_a_restart_of_the_store(tmp_path: Path) -> None:
    directory = tmp_path / "valkey"
    with running_valkey(directory, append_only=True) as url:
        store = Store(connect(url), durable=True)
        await TenantStore(store).create("acme")
        _, secret = await TenantStore(store).create_key("acme", ["infer"])
        salt = (await TenantStore(store).authenticate(secret)).salt
        await store.close()
    with running_valkey(directory, append_only=True) as url:
        store = Store(connect(url), durable=True)
        assert (await TenantStore(store).authenticate(secret)).salt == salt
        await store.close()


async def test_without_the_store_nobody_gets_in() -> None:
    with running_valkey() as url:
        store = Store(connect(url), durable=False)
        tenants = TenantStore(store)
        await tenants.ensure_admin_key(GIVEN)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await tenants.authenticate(GIVEN)
    with pytest.raises(StoreUnavailable):
        await tenants.create("acme")
    assert time.monotonic() - started < 2
    await store.close()


async def test_conflict(tenants: TenantStore) -> None:
    await tenants.create("acme")
    with pytest.raises(Conflict):
        await tenants.create("acme")
