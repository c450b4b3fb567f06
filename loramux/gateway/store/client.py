"""The client of the store. Whatever keeps it from answering is `StoreUnavailable`, soon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis import exceptions as redis_errors
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from loramux.errors import StoreUnavailable

TIMEOUT_S = 1.5
_SYNC_TIMEOUT_MS = 1000
_REFUSALS = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    redis_errors.OutOfMemoryError,
    redis_errors.ClusterDownError,
    OSError,
)


@contextmanager
def outages_named() -> Iterator[None]:
    """Raises `StoreUnavailable` in place of what the client raises when a server is gone, hangs, loads or can't write."""
    try:
        yield
    except _REFUSALS as error:
        raise StoreUnavailable("The store can't be reached.") from error
    except redis_errors.ResponseError as error:
        if not str(error).startswith(("MISCONF", "NOREPLICAS", "MASTERDOWN")):
            raise
        raise StoreUnavailable("The store can't write.") from error


class StorePipeline(Pipeline):
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        with outages_named():
            return await super().execute(raise_on_error)


class StoreClient(Redis):
    """A Redis client whose outages are `StoreUnavailable`. A command is sent again once if its connection had gone stale."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with outages_named():
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> StorePipeline:
        return StorePipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


def connect(url: str) -> StoreClient:
    """A client for `redis://`, `rediss://` or `unix://`; connects on first use. Raises ValueError for another URL."""
    retry = Retry(NoBackoff(), 1, supported_errors=(redis_errors.ConnectionError,))
    client: StoreClient = StoreClient.from_url(  # type: ignore[assignment]
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=retry, protocol=2
    )
    return client


class Store:
    """Runs scripts. With `durable` a change is answered once the server has it on its disk (`WAITAOF 1 0`)."""

    def __init__(self, client: StoreClient, *, durable: bool) -> None:
        self.client = client
        self.durable = durable

    async def ping(self) -> None:
        """Raises `StoreUnavailable`."""
        await self.client.ping()

    async def read(self, script: str, keys: Sequence[str], *args: str | bytes | float) -> Any:
        return await self.client.eval(script, len(keys), *keys, *args)

    async def write(self, script: str, keys: Sequence[str], *args: str | bytes | float) -> Any:
        """WAITAOF goes down the same connection as the change, because it waits for that connection's changes only."""
        if not self.durable:
            return await self.read(script, keys, *args)
        pipeline = self.client.pipeline(transaction=False)
        pipeline.eval(script, len(keys), *keys, *args)
        pipeline.execute_command("WAITAOF", 1, 0, _SYNC_TIMEOUT_MS)
        result, (num_local, _) = await pipeline.execute()
        if num_local < 1:
            raise StoreUnavailable("The store did not get the change onto its disk in time; it may still do so.")
        return result

    async def close(self) -> None:
        await self.client.aclose()


async def waits_for_disk(client: StoreClient) -> bool:
    """Whether the server knows WAITAOF and keeps an append-only file."""
    try:
        await client.execute_command("WAITAOF", 1, 0, 1)
    except redis_errors.ResponseError:
        return False
    return True
