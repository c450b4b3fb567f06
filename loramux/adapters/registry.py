"""Which adapters there are, under which names, and whose they are; kept over the Redis protocol.

Keys, all of one hash tag so that a script may touch any of them:

    {reg}:names                  set     adapters that have versions
    {reg}:a:<name>               hash    `next`: the last version number given out, which outlives the adapter, so that none is given
                                         out twice; `digest:<number>`, `base:<number>`: of each version
    {reg}:a:<name>:versions      hash    version number -> AdapterVersion as JSON
    {reg}:a:<name>:contents      hash    what makes two registrations the same -> version number
    {reg}:a:<name>:aliases       hash    alias -> version number
    {reg}:a:<name>:grants        set     tenant ids, or `*`
    {reg}:a:<name>:draining      set     numbers of the versions that are not ready
    {reg}:a:<name>:wanted        hash    `preload:<number>`, `pin:<number>` -> the tier that the operator wants it in
    {reg}:digests                hash    content digest -> how many versions have it
    {reg}:draining               hash    content digest -> how many of those are draining
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loramux.adapters import registry_scripts as scripts
from loramux.adapters.ref import DEFAULT_ALIAS, ModelRef, check_alias, check_name, model_not_found
from loramux.adapters.types import AdapterVersion, RegistrationReport, Tier
from loramux.errors import Conflict, Draining, NotFound, StoreUnavailable

if TYPE_CHECKING:
    from redis.asyncio import Redis


EVERYONE = "*"
"""The grant that covers every tenant."""
_SYNC_TIMEOUT_MS = 1000
"""Below the socket timeout of the client, 1.5 s, which would cut the wait off."""


class Registered(NamedTuple):
    version: AdapterVersion
    created: bool
    """False if the same content and metadata were registered under the name before."""


class Digests(NamedTuple):
    """Content digests of versions."""

    named: frozenset[str]
    """That some version has; contents of others can be deleted."""
    served: frozenset[str]
    """That some ready version has; an engine needs no others."""


class Wanted(NamedTuple):
    """What the operator wants of the engines, in force until it is taken back or the version is drained or deleted."""

    digest: str
    tier: Tier
    pinned: bool


class AdapterRecord(msgspec.Struct, frozen=True):
    """All that is known of one adapter name."""

    name: str
    versions: tuple[AdapterVersion, ...]
    """In order of number."""
    aliases: dict[str, int]
    grants: tuple[str, ...]
    """Tenant ids in order, or `*`."""


class Registry:
    """Every change is one script. Errors of the Redis client pass through unchanged.

    With `durable`, a change returns only once the server has it on disk (`WAITAOF 1 0`, which the server must know).
    """

    def __init__(self, client: Redis, *, durable: bool = False) -> None:
        self._client = client
        self._durable = durable

    async def register(
        self,
        name: str,
        base_digest: str,
        digest: str,
        report: RegistrationReport,
        source: str,
        tenants: Collection[str],
        metadata: Mapping[str, Any] | None = None,
    ) -> Registered:
        """Add a version, or find the one that has the same base, digest and metadata. `tenants` are granted besides those that are.

        The first version sets the alias `prod`; later ones never move it. One found that was draining is ready again. Raises
        `InvalidRequest` for a bad name.
        """
        check_name(name)
        version = AdapterVersion(
            name=name,
            version=0,
            digest=digest,
            base_digest=base_digest,
            state="ready",
            created_at=time.time(),
            report=report,
            source=source,
            metadata=dict(metadata or {}),
        )
        args = [name, digest, base_digest, _content_key(version), msgspec.json.encode(version), DEFAULT_ALIAS, *tenants]
        number, created, record = await self._write(scripts.REGISTER, args)
        return Registered(_version(number, record), bool(created))

    async def resolve(self, ref: ModelRef, tenant_id: str, *, base_digest: str | None = None) -> AdapterVersion:
        """The exact version that a model name means to a tenant.

        Raises the same `ModelNotFound` where the adapter, alias or version is unknown, where it is not granted to the tenant, and,
        with `base_digest`, where the version is of another base; `Draining` where none of that is so but the version is not ready.
        """
        if ref.adapter is None:
            raise ValueError("the base is not in the registry")
        found = await self._run(scripts.RESOLVE, [ref.adapter, tenant_id, ref.alias or "", str(ref.version or "")])
        if not found:
            raise model_not_found(ref.requested)
        version = _version(*found)
        if base_digest is not None and version.base_digest != base_digest:
            raise model_not_found(ref.requested)
        if version.state == "draining":
            raise Draining(f"{ref.requested} is being taken out of service")
        return version

    async def visible(self, tenant_id: str, *, base_digest: str | None = None) -> tuple[str, ...]:
        """Names of the adapters that the tenant may use, in order; with `base_digest`, of those whose `prod` is of that base."""
        found = await self._run(scripts.VISIBLE, [tenant_id, base_digest or "", DEFAULT_ALIAS])
        return tuple(sorted(_text(name) for name in found))

    async def get(self, name: str) -> AdapterRecord:
        """Raises `NotFound`."""
        record = await self._record(name)
        if record is None:
            raise _no_adapter()
        return record

    async def get_version(self, name: str, version: int) -> AdapterVersion:
        """Raises `NotFound`."""
        for each in (await self.get(name)).versions:
            if each.version == version:
                return each
        raise _no_version()

    async def list(self) -> tuple[AdapterRecord, ...]:
        """Every adapter, in order of name."""
        names = sorted(_text(name) for name in await self._run(scripts.NAMES, []))
        records = [await self._record(name) for name in names]
        return tuple(record for record in records if record is not None)

    async def set_alias(self, name: str, alias: str, version: int) -> None:
        """Raises `InvalidRequest` for a bad alias, `NotFound` if there is no such version."""
        check_alias(alias)
        if not await self._write(scripts.SET_ALIAS, [name, alias, str(version)]):
            raise _no_version()

    async def set_grants(self, name: str, tenants: Collection[str]) -> None:
        """Replace the grants. Raises `NotFound`."""
        if not await self._write(scripts.SET_GRANTS, [name, *tenants]):
            raise _no_adapter()

    async def revoke(self, tenant_id: str) -> None:
        """Take a tenant out of every grant."""
        await self._write(scripts.REVOKE, [tenant_id])

    async def drain(self, name: str, version: int) -> AdapterVersion:
        """Let no new request have the version, and want nothing more of it. Raises `NotFound`."""
        record = await self._write(scripts.DRAIN, [name, str(version)])
        if record is None:
            raise _no_version()
        return _version(version, record, draining=True)

    async def want(self, name: str, version: int, tier: Tier, *, pinned: bool) -> None:
        """Keep what engines shall have from their start. Raises `NotFound`; `Conflict` for a version that is draining."""
        kind = "pin" if pinned else "preload"
        state = _text(await self._write(scripts.WANT, [name, str(version), kind, tier]))
        if state == "missing":
            raise _no_version()
        if state == "draining":
            raise Conflict(f"{name}@{version} is draining; register it again first")

    async def unpin(self, name: str, version: int) -> None:
        """Want no pin any more. Raises `NotFound`."""
        if not await self._write(scripts.UNPIN, [name, str(version)]):
            raise _no_version()

    async def wanted(self, base_digest: str) -> tuple[Wanted, ...]:
        """Of versions of that base, pins first."""
        found = await self._run(scripts.WANTED, [base_digest])
        return tuple(sorted((_wanted(*each) for each in found), key=lambda each: not each.pinned))

    async def delete_version(self, name: str, version: int) -> None:
        """Raises `NotFound`; `Conflict` while an alias points at it."""
        found, alias = await self._write(scripts.DELETE_VERSION, [name, str(version)])
        if alias:
            raise Conflict(f"the alias {_text(alias)} points at {name}@{version}; move it first")
        if not found:
            raise _no_version()

    async def delete_adapter(self, name: str) -> None:
        """Delete every version, alias and grant of the name. Raises `NotFound`."""
        if not await self._write(scripts.DELETE_ADAPTER, [name]):
            raise _no_adapter()

    async def digests(self) -> Digests:
        named, served = await self._run(scripts.DIGESTS, [])
        return Digests(frozenset(map(_text, named)), frozenset(map(_text, served)))

    async def _record(self, name: str) -> AdapterRecord | None:
        versions, aliases, grants, draining = await self._run(scripts.RECORD, [name])
        if not versions:
            return None
        found = (_version(number, record, draining=number in draining) for number, record in _pairs(versions))
        return AdapterRecord(
            name=name,
            versions=tuple(sorted(found, key=lambda version: version.version)),
            aliases={_text(alias): int(number) for alias, number in sorted(_pairs(aliases))},
            grants=tuple(sorted(_text(tenant) for tenant in grants)),
        )

    async def _run(self, script: str, args: Sequence[Any]) -> Any:
        return await self._client.eval(script, 1, scripts.KEY, *args)

    async def _write(self, script: str, args: Sequence[Any]) -> Any:
        if not self._durable:
            return await self._run(script, args)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.eval(script, 1, scripts.KEY, *args)
        pipeline.execute_command("WAITAOF", 1, 0, _SYNC_TIMEOUT_MS)
        result, (num_synced, _) = await pipeline.execute()
        if not num_synced:
            raise StoreUnavailable("the store has not written the change to its disk")
        return result


def _content_key(version: AdapterVersion) -> str:
    parts = msgspec.json.encode([version.base_digest, version.digest, version.metadata], order="sorted")
    return hashlib.sha256(parts).hexdigest()


def _version(number: Any, record: Any, draining: Any = False) -> AdapterVersion:
    """The record holds 0 for the number, which the store gave out after it was encoded, and the state that every version begins in."""
    version = msgspec.json.decode(record, type=AdapterVersion)
    return msgspec.structs.replace(version, version=int(number), state="draining" if draining else "ready")


def _wanted(digest: Any, kind: Any, tier: Any) -> Wanted:
    return Wanted(_text(digest), "device" if _text(tier) == "device" else "host", pinned=_text(kind) == "pin")


def _pairs(flat: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _no_adapter() -> NotFound:
    return NotFound("no such adapter")


def _no_version() -> NotFound:
    return NotFound("no such version of that adapter")
