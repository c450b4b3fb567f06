"""Who is asking. Frozen; made by `tenancy/store.py`, read by every route."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key, as of this request."""

    tenant_id: str
    """Empty for the operator's admin key, which belongs to no tenant."""
    key_id: str
    scopes: frozenset[str]
    salt: bytes = field(repr=False)
    """The tenant's cache salt: 32 bytes, derived, never empty. Left out of `repr` so that it reaches no log."""
    weight: float
    """The tenant's share of an engine."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant as the admin routes show it."""

    id: str
    weight: float
    created_at: float
    """Unix seconds."""
    salt_epoch: int
    """Rises with every rotation."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key as the admin routes show it: never its secret, nor the hash."""

    id: str
    """`<tenant>.<8 hex>`"""
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None
    """Unix seconds; None never expires."""
