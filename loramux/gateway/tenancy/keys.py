"""API keys `lmx_<tenant>.<8 hex>_<64 hex>`, scopes, and the salt of a tenant's caches. Pure functions."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import NamedTuple

from loramux.errors import InvalidRequest

TENANT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_KEY = re.compile(r"lmx_(?P<id>(?P<tenant>[a-z0-9][a-z0-9-]{0,62})\.[0-9a-f]{8})_[0-9a-f]{64}")
_SALT_DOMAIN = b"loramux tenant salt 1"

SCOPES = frozenset({"infer", "admin"})
"""`admin` lets a tenant's key do all that the operator's admin key does."""
SCOPES_NOT_BUILT = frozenset({"adapters:write"})
ADMIN_TENANT = "admin"
"""The tenant part of the operator's key; no tenant may have it as its id."""


class NewKey(NamedTuple):
    id: str
    key: str
    """The secret: shown once, kept nowhere."""
    hash: str


class ParsedKey(NamedTuple):
    tenant_id: str
    id: str


def new_key(tenant_id: str) -> NewKey:
    key_id = f"{tenant_id}.{secrets.token_hex(4)}"
    key = f"lmx_{key_id}_{secrets.token_hex(32)}"
    return NewKey(key_id, key, key_hash(key))


def parse_key(text: str) -> ParsedKey | None:
    """Whose key it claims to be; None if it is no key of a tenant."""
    match = _KEY.fullmatch(text)
    return ParsedKey(match["tenant"], match["id"]) if match and match["tenant"] != ADMIN_TENANT else None


def key_hash(key: str) -> str:
    """SHA-256 in hex, of the whole key. Its 256 random bits need no slower hash."""
    return hashlib.sha256(key.encode()).hexdigest()


def same_hash(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(), b.encode())


def check_tenant_id(tenant_id: str) -> None:
    """Raises InvalidRequest."""
    if not TENANT_ID.fullmatch(tenant_id):
        raise InvalidRequest(f"A tenant's id must match {TENANT_ID.pattern}.", param="/id")
    if tenant_id == ADMIN_TENANT:
        raise InvalidRequest(f"The tenant id {ADMIN_TENANT!r} is taken by the operator's key.", param="/id")


def tenant_salt(secret: bytes, tenant_id: str, epoch: int) -> bytes:
    """HMAC-SHA-256 of the tenant's secret over length-delimited fields: 32 bytes."""
    fields = (_SALT_DOMAIN, tenant_id.encode(), epoch.to_bytes(8, "big"))
    message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hmac.new(secret, message, hashlib.sha256).digest()
