"""Tenants and keys in the store. Nothing is cached: a key that was deleted, or a salt that was rotated, is so from the next request.

{t:<tenant>}          hash   weight, created_at, salt_secret, salt_epoch
{t:<tenant>}:keys     hash   key id -> StoredKey as JSON
loramux:tenants       set    ids; an id without its hash is a creation or deletion that was cut off, and counts for nothing
loramux:admin-key     string SHA-256 of the operator's key
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from loramux.errors import AuthenticationFailed, Conflict, InvalidRequest, NotFound
from loramux.gateway.store.client import Store
from loramux.gateway.tenancy import scripts
from loramux.gateway.tenancy.keys import (
    ADMIN_TENANT,
    SCOPES,
    NewKey,
    ParsedKey,
    check_tenant_id,
    key_hash,
    new_key,
    parse_key,
    same_hash,
    tenant_salt,
)
from loramux.gateway.tenancy.types import Key, Principal, Tenant

OPEN_TENANT = "open"
"""The one tenant of `--no-auth`."""
_INDEX = "loramux:tenants"
_ADMIN_KEY = "loramux:admin-key"
_SECRET_BYTES = 32
_MIN_GIVEN_KEY_CHARS = 16
_NO_HASH = "0" * 64


class StoredKey(msgspec.Struct, frozen=True):
    hash: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None = None


class TenantStore:
    """Every method raises `StoreUnavailable` when the store is out of reach: nobody gets in without it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, tenant_id: str, weight: float = 1.0) -> Tenant:
        """Raises InvalidRequest for a bad id, Conflict if the tenant exists."""
        check_tenant_id(tenant_id)
        await self._store.write(scripts.ADD_TO_INDEX, [_INDEX], tenant_id)
        secret = secrets.token_bytes(_SECRET_BYTES)
        if not await self._store.write(scripts.CREATE, _keys(tenant_id), weight, time.time(), secret):
            raise Conflict(f"The tenant {tenant_id} exists already.", param="/id")
        return await self.get(tenant_id)

    async def get(self, tenant_id: str) -> Tenant:
        """Raises NotFound."""
        weight, created_at, epoch = await self._store.read(scripts.READ, _keys(tenant_id))
        if weight is None:
            raise _no_tenant()
        return Tenant(tenant_id, float(weight), float(created_at), int(epoch))

    async def list(self) -> Sequence[Tenant]:
        """In order of id."""
        found = []
        for tenant_id in sorted(member.decode() for member in await self._store.read(scripts.MEMBERS, [_INDEX])):
            try:
                found.append(await self.get(tenant_id))
            except NotFound:
                continue
        return found

    async def set_weight(self, tenant_id: str, weight: float) -> Tenant:
        """Raises NotFound."""
        if not await self._store.write(scripts.SET_WEIGHT, _keys(tenant_id), weight):
            raise _no_tenant()
        return await self.get(tenant_id)

    async def rotate_salt(self, tenant_id: str) -> Tenant:
        """From the next request on the tenant shares no cached block with its own past. Raises NotFound."""
        if not await self._store.write(scripts.ROTATE_SALT, _keys(tenant_id), secrets.token_bytes(_SECRET_BYTES)):
            raise _no_tenant()
        return await self.get(tenant_id)

    async def delete(self, tenant_id: str) -> None:
        """With its keys and its salt. Raises NotFound."""
        if not await self._store.write(scripts.DELETE, _keys(tenant_id)):
            raise _no_tenant()
        await self._store.write(scripts.REMOVE_FROM_INDEX, [_INDEX], tenant_id)

    async def create_key(self, tenant_id: str, scopes: Sequence[str], expires_at: float | None = None) -> tuple[Key, str]:
        """The key's record, and the key itself, which is kept nowhere. Raises NotFound."""
        new, now = new_key(tenant_id), time.time()
        stored = StoredKey(new.hash, tuple(sorted(set(scopes))), now, expires_at)
        if not await self._store.write(scripts.ADD_KEY, _keys(tenant_id), new.id, msgspec.json.encode(stored)):
            raise _no_tenant()
        return _shown(new.id, stored), new.key

    async def list_keys(self, tenant_id: str) -> Sequence[Key]:
        """Raises NotFound."""
        flat = await self._store.read(scripts.LIST_KEYS, _keys(tenant_id))
        if flat is None:
            raise _no_tenant()
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return sorted((_shown(key_id.decode(), _decode(record)) for key_id, record in pairs), key=lambda key: (key.created_at, key.id))

    async def delete_key(self, tenant_id: str, key_id: str) -> None:
        """It stops working with the next request. Raises NotFound."""
        if not await self._store.write(scripts.DELETE_KEY, _keys(tenant_id), key_id):
            raise NotFound("There is no such key.")

    async def authenticate(self, presented: str) -> Principal:
        """Raises AuthenticationFailed, the same for every reason."""
        parsed = parse_key(presented)
        return await (self._tenant_principal(parsed, presented) if parsed else self._admin_principal(presented))

    async def open_principal(self) -> Principal:
        """The tenant of `--no-auth`, which `ensure_open_tenant` made."""
        weight, secret, epoch, _ = await self._store.read(scripts.AUTHENTICATE, _keys(OPEN_TENANT), "")
        if weight is None:
            raise _refused()
        return Principal(OPEN_TENANT, "", frozenset({"infer"}), tenant_salt(secret, OPEN_TENANT, int(epoch)), float(weight))

    async def ensure_open_tenant(self) -> None:
        try:
            await self.create(OPEN_TENANT)
        except Conflict:
            return

    async def ensure_admin_key(self, given: str | None) -> str | None:
        """Set the operator's key to `given`; without it, make one where there is none, and return it to be shown once.

        Raises InvalidRequest if `given` is too short to be a secret, or would be taken for a tenant's key.
        """
        if given is not None:
            if len(given) < _MIN_GIVEN_KEY_CHARS or not given.isascii() or not given.isprintable() or " " in given:
                raise InvalidRequest(f"LORAMUX_ADMIN_KEY needs at least {_MIN_GIVEN_KEY_CHARS} printable ASCII characters, no spaces")
            if parse_key(given) is not None:
                raise InvalidRequest("LORAMUX_ADMIN_KEY is a tenant's key; give another")
            await self._store.write(scripts.SET, [_ADMIN_KEY], key_hash(given))
            return None
        new: NewKey = new_key(ADMIN_TENANT)
        return new.key if await self._store.write(scripts.SET_ONCE, [_ADMIN_KEY], new.hash) else None

    async def _admin_principal(self, presented: str) -> Principal:
        stored = await self._store.read(scripts.GET, [_ADMIN_KEY])
        if not same_hash(key_hash(presented), stored.decode() if stored else _NO_HASH):
            raise _refused()
        return Principal("", ADMIN_TENANT, frozenset({"admin"}), b"", 1.0)

    async def _tenant_principal(self, parsed: ParsedKey, presented: str) -> Principal:
        weight, secret, epoch, record = await self._store.read(scripts.AUTHENTICATE, _keys(parsed.tenant_id), parsed.id)
        stored = _decode(record) if record else StoredKey(_NO_HASH, (), 0.0)
        matches = same_hash(key_hash(presented), stored.hash)
        if not matches or weight is None or (stored.expires_at is not None and stored.expires_at <= time.time()):
            raise _refused()
        salt = tenant_salt(secret, parsed.tenant_id, int(epoch))
        return Principal(parsed.tenant_id, parsed.id, SCOPES.intersection(stored.scopes), salt, float(weight))


def _keys(tenant_id: str) -> list[str]:
    return [f"{{t:{tenant_id}}}", f"{{t:{tenant_id}}}:keys"]


def _decode(record: bytes) -> StoredKey:
    return msgspec.json.decode(record, type=StoredKey)


def _shown(key_id: str, stored: StoredKey) -> Key:
    return Key(key_id, stored.scopes, stored.created_at, stored.expires_at)


def _no_tenant() -> NotFound:
    return NotFound("There is no such tenant.")


def _refused() -> AuthenticationFailed:
    return AuthenticationFailed("The API key is wrong, expired or revoked.")
