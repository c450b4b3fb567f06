from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from loramux.adapters.ref import ModelRef, parse_model
from loramux.adapters.registry import Digests, Registered, Registry, Wanted
from loramux.errors import Conflict, Draining, InvalidRequest, ModelNotFound, NotFound
from tests.adapters.samples import BASE, REPORT
from tests.valkey import running_valkey

ONE, TWO, THREE = (f"sha256:{digit * 64}" for digit in "123")


@pytest.fixture
def registry(valkey: Redis) -> Registry:
    return Registry(valkey)


async def add(
    registry: Registry, digest: str = ONE, *, name: str = "tickets", tenants: tuple[str, ...] = ("acme",), **metadata: object
) -> Registered:
    return await registry.register(name, BASE.digest, digest, REPORT, "upload", tenants, metadata)


def ref(text: str) -> ModelRef:
    return parse_model(f"tiny:{text}", ["tiny"])


async def test_the_first_version_is_prod_and_later_ones_are_not(registry: Registry) -> None:
    first = await add(registry, ONE)
    second = await add(registry, TWO)
    assert (first.version.id, second.version.id, first.created, second.created) == ("tickets@1", "tickets@2", True, True)
    assert (await registry.resolve(ref("tickets"), "acme")).digest == ONE
    assert (await registry.resolve(ref("tickets@2"), "acme")) == second.version
    await registry.set_alias("tickets", "prod", 2)
    assert (await registry.resolve(ref("tickets@prod"), "acme")).digest == TWO


async def test_the_same_content_and_metadata_is_the_same_version(registry: Registry) -> None:
    first = await add(registry, ONE, format={"a": 1, "b": 2})
    again = await add(registry, ONE, format={"b": 2, "a": 1})
    assert again == Registered(first.version, created=False)
    assert (await add(registry, ONE, format={"a": 2})).version.version == 2
    other_base = await registry.register("tickets", "sha256:other", ONE, REPORT, "upload", (), {"format": {"a": 1, "b": 2}})
    assert other_base.created


async def test_records_come_back_whole(registry: Registry) -> None:
    version = (await add(registry, ONE, note="für alle", nested={"list": [], "x": 0.1})).version
    assert version.report == REPORT and version.base_digest == BASE.digest and version.state == "ready"
    record = await registry.get("tickets")
    assert record.versions == (version,) and record.aliases == {"prod": 1} and record.grants == ("acme",)
    assert await registry.get_version("tickets", 1) == version
    assert await registry.list() == (record,)


async def test_unknown_and_not_granted_are_the_same(registry: Registry) -> None:
    await add(registry, ONE)
    answers = set()
    for text, tenant in (("tickets", "globex"), ("nothing", "acme"), ("tickets@9", "acme"), ("tickets@beta", "acme")):
        with pytest.raises(ModelNotFound) as raised:
            await registry.resolve(ref(text), tenant)
        answers.add(raised.value.message.replace(f"tiny:{text}", "X"))
    assert len(answers) == 1


async def test_an_adapter_of_another_base_is_not_found(registry: Registry) -> None:
    await add(registry, ONE)
    assert (await registry.resolve(ref("tickets"), "acme", base_digest=BASE.digest)).digest == ONE
    assert await registry.visible("acme", base_digest=BASE.digest) == ("tickets",)
    assert await registry.visible("acme", base_digest="sha256:other") == ()
    with pytest.raises(ModelNotFound):
        await registry.resolve(ref("tickets"), "acme", base_digest="sha256:other")


async def test_grants(registry: Registry) -> None:
    await add(registry, ONE)
    await add(registry, TWO, name="sql", tenants=("*",))
    await add(registry, THREE, name="nobodys", tenants=())
    assert await registry.visible("acme") == ("sql", "tickets")
    assert await registry.visible("globex") == ("sql",)
    await add(registry, ONE, tenants=("globex",))
    assert (await registry.get("tickets")).grants == ("acme", "globex")
    await registry.set_grants("tickets", ["globex"])
    assert await registry.visible("acme") == ("sql",)
    with pytest.raises(ModelNotFound):
        await registry.resolve(ref("tickets"), "acme")
    await registry.set_grants("tickets", [])
    assert await registry.visible("globex") == ("sql",)
    with pytest.raises(NotFound):
        await registry.set_grants("nothing", ["acme"])


async def test_a_tenant_is_revoked_everywhere_and_nobody_else_is(registry: Registry) -> None:
    for name, granted in (("one", ("acme",)), ("two", ("acme", "globex")), ("three", ("*",))):
        await add(registry, name=name, tenants=granted)
    await registry.revoke("acme")
    assert [record.grants for record in await registry.list()] == [(), ("*",), ("globex",)]


async def test_a_tenant_called_like_a_prefix_gets_nothing(registry: Registry) -> None:
    await add(registry, ONE, tenants=("acme-two",))
    for tenant in ("acme", "acme-", "*", "", "acme-two-x"):
        assert await registry.visible(tenant) == ()


async def test_deleting_a_version(registry: Registry) -> None:
    await add(registry, ONE)
    await add(registry, TWO)
    with pytest.raises(Conflict, match="prod"):
        await registry.delete_version("tickets", 1)
    await registry.set_alias("tickets", "prod", 2)
    await registry.delete_version("tickets", 1)
    with pytest.raises(NotFound):
        await registry.delete_version("tickets", 1)
    with pytest.raises(NotFound):
        await registry.get_version("tickets", 1)
    with pytest.raises(ModelNotFound):
        await registry.resolve(ref("tickets@1"), "acme")
    assert (await add(registry, ONE)).version.version == 3


async def test_deleting_an_adapter_never_gives_its_numbers_out_again(registry: Registry) -> None:
    await add(registry, ONE)
    await add(registry, TWO)
    await registry.delete_adapter("tickets")
    with pytest.raises(NotFound):
        await registry.get("tickets")
    with pytest.raises(NotFound):
        await registry.delete_adapter("tickets")
    assert await registry.visible("acme") == () and await registry.list() == ()
    again = await add(registry, ONE, tenants=("globex",))
    assert again.created and again.version.version == 3
    assert (await registry.resolve(ref("tickets"), "globex")).version == 3
    assert (await registry.get("tickets")).grants == ("globex",)


async def test_digests_are_those_that_versions_have(registry: Registry) -> None:
    await add(registry, ONE)
    await add(registry, ONE, name="copy")
    await add(registry, ONE, note="again")
    await add(registry, TWO)
    assert await registry.digests() == Digests({ONE, TWO}, {ONE, TWO})
    await registry.delete_adapter("tickets")
    assert await registry.digests() == Digests({ONE}, {ONE})
    await registry.delete_adapter("copy")
    assert await registry.digests() == Digests(frozenset(), frozenset())


async def test_a_draining_version_takes_no_requests_until_it_is_registered_again(registry: Registry) -> None:
    ready = (await add(registry, ONE)).version
    drained = await registry.drain("tickets", 1)
    assert drained == await registry.get_version("tickets", 1) == await registry.drain("tickets", 1)
    assert drained.state == "draining" and drained.report == REPORT
    for text in ("tickets", "tickets@1", "tickets@prod"):
        with pytest.raises(Draining):
            await registry.resolve(ref(text), "acme")
    with pytest.raises(ModelNotFound):
        await registry.resolve(ref("tickets"), "globex")
    with pytest.raises(ModelNotFound):
        await registry.resolve(ref("tickets"), "acme", base_digest="sha256:other")
    assert await add(registry, ONE) == Registered(ready, created=False)
    assert await registry.resolve(ref("tickets"), "acme") == ready
    for name, version in (("tickets", 2), ("nothing", 1)):
        with pytest.raises(NotFound):
            await registry.drain(name, version)


async def test_a_digest_is_served_while_one_version_that_has_it_is_ready(registry: Registry) -> None:
    for name in ("one", "two"):
        await add(registry, ONE, name=name)
    await registry.drain("one", 1)
    assert await registry.digests() == Digests({ONE}, {ONE})
    await registry.drain("two", 1)
    assert await registry.digests() == Digests({ONE}, frozenset())
    await add(registry, ONE, name="two")
    assert await registry.digests() == Digests({ONE}, {ONE})
    await registry.delete_adapter("two")
    assert await registry.digests() == Digests({ONE}, frozenset())
    await registry.delete_adapter("one")
    assert await registry.digests() == Digests(frozenset(), frozenset())
    await add(registry, ONE, name="one")
    assert await registry.digests() == Digests({ONE}, {ONE})


async def test_what_is_wanted_lasts_as_long_as_its_version_is_ready(registry: Registry) -> None:
    for name, digest in (("one", ONE), ("two", TWO), ("three", THREE)):
        await add(registry, digest, name=name)
    await registry.want("one", 1, "host", pinned=False)
    await registry.want("one", 1, "device", pinned=True)
    await registry.want("two", 1, "device", pinned=True)
    await registry.want("three", 1, "device", pinned=False)
    pins = {Wanted(ONE, "device", True), Wanted(TWO, "device", True)}
    found = await registry.wanted(BASE.digest)
    assert set(found[:2]) == pins and set(found[2:]) == {Wanted(ONE, "host", False), Wanted(THREE, "device", False)}
    assert await registry.wanted("sha256:other") == ()
    await registry.unpin("one", 1)
    await registry.drain("two", 1)
    await registry.delete_adapter("three")
    assert await registry.wanted(BASE.digest) == (Wanted(ONE, "host", False),)
    await add(registry, TWO, name="two")
    assert await registry.wanted(BASE.digest) == (Wanted(ONE, "host", False),)
    await registry.set_alias("one", "prod", (await add(registry, TWO, name="one")).version.version)
    await registry.delete_version("one", 1)
    assert await registry.wanted(BASE.digest) == ()


async def test_nothing_is_wanted_of_a_version_that_is_not_ready(registry: Registry) -> None:
    await add(registry, ONE)
    await registry.drain("tickets", 1)
    with pytest.raises(Conflict, match="draining"):
        await registry.want("tickets", 1, "device", pinned=True)
    for name, version in (("tickets", 2), ("nothing", 1)):
        with pytest.raises(NotFound):
            await registry.want(name, version, "device", pinned=False)
        with pytest.raises(NotFound):
            await registry.unpin(name, version)
    assert await registry.wanted(BASE.digest) == ()


async def test_aliases(registry: Registry) -> None:
    await add(registry, ONE)
    await registry.set_alias("tickets", "canary", 1)
    assert (await registry.resolve(ref("tickets@canary"), "acme")).version == 1
    for name, version in (("tickets", 2), ("nothing", 1)):
        with pytest.raises(NotFound):
            await registry.set_alias(name, "canary", version)
    for alias in ("3", "Canary", "a:b"):
        with pytest.raises(InvalidRequest):
            await registry.set_alias("tickets", alias, 1)


async def test_bad_names(registry: Registry) -> None:
    for name in ("", "../x", "a:b", "A"):
        with pytest.raises(InvalidRequest):
            await add(registry, name=name)
    assert await registry.list() == ()


async def test_concurrent_registrations(registry: Registry) -> None:
    digests = [f"sha256:{number:064x}" for number in range(8)]
    results = await asyncio.gather(*(add(registry, digest) for digest in digests * 3))
    assert sum(result.created for result in results) == 8
    assert sorted({result.version.version for result in results}) == list(range(1, 9))
    assert len((await registry.get("tickets")).versions) == 8


async def test_either_kind_of_client(valkey_url: str, valkey: Redis) -> None:
    client = Redis.from_url(valkey_url, decode_responses=True)
    registry = Registry(client)
    created = await add(registry, ONE)
    assert await registry.get_version("tickets", 1) == created.version
    assert await registry.visible("acme") == ("tickets",)
    assert await registry.digests() == Digests({ONE}, {ONE})
    await registry.want("tickets", 1, "host", pinned=True)
    assert await registry.wanted(BASE.digest) == (Wanted(ONE, "host", True),)
    with pytest.raises(Conflict, match="prod"):
        await registry.delete_version("tickets", 1)
    await client.aclose()


async def test_every_key_has_the_registrys_tag(registry: Registry, valkey: Redis) -> None:
    await add(registry, ONE)
    await registry.set_alias("tickets", "canary", 1)
    await registry.want("tickets", 1, "host", pinned=True)
    await add(registry, TWO)
    await registry.drain("tickets", 2)
    assert all(key.startswith(b"{reg}:") for key in await valkey.keys())


async def test_a_durable_change_survives_the_server(tmp_path: Path) -> None:
    for expected in (1, 2):
        with running_valkey(tmp_path, append_only=True) as url:
            client = Redis.from_url(url)
            registry = Registry(client, durable=True)
            assert (await add(registry, f"sha256:{expected}")).version.version == expected
            assert (await registry.resolve(ref("tickets"), "acme")).version == 1
            assert len(await registry.wanted(BASE.digest)) == expected - 1
            await registry.want("tickets", expected, "host", pinned=True)
            await client.aclose()
