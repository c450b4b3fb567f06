"""Opening the store that the settings name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from redis import exceptions as redis_errors

from loramux.errors import StartupFailed, StoreUnavailable
from loramux.gateway.store.client import Store, connect, waits_for_disk
from loramux.gateway.store.embedded import EmbeddedServer
from loramux.gateway.store.schema import migrate

log = logging.getLogger("loramux.store")


@asynccontextmanager
async def open_store(store_url: str, data_dir: Path, runtime_dir: Path, lock: int) -> AsyncIterator[Store]:
    """The store, migrated; an embedded server is started, watched, and stopped at the end. Raises `StartupFailed`."""
    if store_url != "embedded":
        async with _connected(store_url) as store:
            yield store
        return
    server = EmbeddedServer(data_dir / "store", runtime_dir / "store.sock", lock)
    try:
        await server.start()
        async with _watched(server), _connected(server.url) as store:
            yield store
    finally:
        await server.stop()


@asynccontextmanager
async def _watched(server: EmbeddedServer) -> AsyncIterator[None]:
    watch = asyncio.create_task(server.watch())
    try:
        yield
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Store]:
    try:
        client = connect(url)
    except ValueError:  # its message may quote a password
        raise StartupFailed("--store-url is no URL of a store: redis://[[user]:password@]host[:port][/number]") from None
    try:
        try:
            store = Store(client, durable=await waits_for_disk(client))
            await migrate(client)
        except TypeError:  # the client takes a query's fields as arguments
            raise StartupFailed(f"--store-url {_without_password(url)} has a query that the store's client does not know") from None
        except (StoreUnavailable, redis_errors.RedisError) as error:
            cause = error.__cause__ or error
            where, how = _without_password(url), type(cause).__name__
            raise StartupFailed(f"the store at {where} does not answer ({how}); check --store-url") from None
        if not store.durable:
            log.warning("the store does not wait for its disk (no WAITAOF, or no append-only file): changes are as durable as its settings")
        yield store
    finally:
        await client.aclose()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
