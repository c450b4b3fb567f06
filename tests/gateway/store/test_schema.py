from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from loramux.errors import StartupFailed
from loramux.gateway.store.client import StoreClient, connect
from loramux.gateway.store.schema import KEY, SCHEMA_VERSION, migrate


@pytest.fixture
async def client(store_url: str) -> AsyncIterator[StoreClient]:
    client = connect(store_url)
    yield client
    await client.aclose()


async def test_an_empty_store_gets_the_version(client: StoreClient) -> None:
    await migrate(client)
    assert int(await client.get(KEY) or 0) == SCHEMA_VERSION
    await migrate(client)


async def test_steps_run_in_order_and_once(client: StoreClient) -> None:
    await client.set(KEY, 1)
    ran = []

    async def first(client: StoreClient) -> None:
        ran.append(1)

    async def second(client: StoreClient) -> None:
        ran.append(2)

    await migrate(client, {1: first, 2: second}, target=3)
    await migrate(client, {1: first, 2: second}, target=3)
    assert ran == [1, 2] and int(await client.get(KEY) or 0) == 3


async def test_a_newer_store_is_refused(client: StoreClient) -> None:
    await client.set(KEY, SCHEMA_VERSION + 1)
    with pytest.raises(StartupFailed, match="newer"):
        await migrate(client)
