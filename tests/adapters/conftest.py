from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from tests.valkey import running_valkey


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with running_valkey() as url:
        yield url


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[Redis]:
    """A client of an empty store."""
    client = Redis.from_url(valkey_url)
    await client.flushall()
    yield client
    await client.aclose()
