"""The keys of KV blocks: one function for the engine's prefix cache and, later, the gateway's routing index.

A key names everything a block's contents depend on: base weights, adapter weights, the tenant's salt, and every token up to the
block's end. Two requests share a block only if all of these are equal.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_SIZE = 32
"""Tokens in a block."""


def root_key(base_digest: str, adapter_digest: str | None, salt: bytes) -> bytes:
    """The parent of a sequence's first block. Fields are typed and length-delimited, so no value can pose as another."""
    digest = hashlib.sha256(b"loramux-prefix-1")
    for tag, value in ((b"base", base_digest.encode()), (b"adapter", adapter_digest and adapter_digest.encode()), (b"salt", salt)):
        presence = b"-" if value is None else b"+"
        data = value or b""
        digest.update(tag + presence + len(data).to_bytes(4, "little") + data)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256(parent, token ids) for one full block; `parent` is 32 bytes, the root's or the previous block's key."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()
