"""`added_tokens.json`, which a tokenizer saves beside an adapter: tokens the base has already change nothing, others can't be served."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loramux.adapters.types import BaseDescription

ADDED_TOKENS_FILE = "added_tokens.json"

_MAX_BYTES = 1 << 20
_MAX_NAMED = 8


def unknown_tokens(added_tokens: bytes, base: BaseDescription) -> Iterable[str]:
    """An error if the file can't be read, or holds a token that the base's tokenizer has not or has under another id."""
    if len(added_tokens) > _MAX_BYTES:
        return [f"{ADDED_TOKENS_FILE} has {len(added_tokens)} bytes, more than {_MAX_BYTES}"]
    try:
        ids = msgspec.json.decode(added_tokens, type=dict[str, int])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return [f"{ADDED_TOKENS_FILE} is not an object of tokens and their ids: {error}"]
    unknown = [token for token, token_id in ids.items() if base.added_tokens.get(token) != token_id]
    return [f"{ADDED_TOKENS_FILE}: {_named(unknown)} not in the base's vocabulary"] if unknown else []


def _named(tokens: list[str]) -> str:
    shown = ", ".join(repr(token[:40]) for token in tokens[:_MAX_NAMED])
    more = f" and {len(tokens) - _MAX_NAMED} more" if len(tokens) > _MAX_NAMED else ""
    return f"{shown}{more} {'is' if len(tokens) == 1 else 'are'}"
