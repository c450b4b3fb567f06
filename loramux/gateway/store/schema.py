"""The version of what is in the store, and the steps from an older one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from loramux.errors import StartupFailed
from loramux.gateway.store.client import StoreClient

KEY = "loramux:schema"
SCHEMA_VERSION = 1

Migration = Callable[[StoreClient], Awaitable[None]]

MIGRATIONS: Mapping[int, Migration] = {}
"""By the version each starts from. A migration may be run again after a crash half-way, so each must bear that."""


async def migrate(client: StoreClient, migrations: Mapping[int, Migration] = MIGRATIONS, target: int = SCHEMA_VERSION) -> None:
    """Bring the store to `target`. Raises `StartupFailed` if it was written by a newer loramux."""
    await client.set(KEY, target, nx=True)
    version = int(await client.get(KEY) or 0)
    if version > target:
        raise StartupFailed(f"the store has schema {version}, this loramux knows {target}; install the newer version that wrote it")
    while version < target:
        await migrations[version](client)
        version += 1
        await client.set(KEY, version)
