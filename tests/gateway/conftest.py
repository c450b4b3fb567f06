from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from tests.gateway.served import Served, served
from tests.valkey import running_valkey


@pytest.fixture(scope="session")
def shared_store_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_valkey(tmp_path_factory.mktemp("store"), append_only=True) as url:
        yield url


@pytest.fixture
def store_url(shared_store_url: str) -> str:
    """A real store with nothing in it."""
    with redis.from_url(shared_store_url) as client:
        client.flushall()
    return shared_store_url


@pytest.fixture
async def app(store_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    async with served(store_url, tmp_path) as running:
        yield running
