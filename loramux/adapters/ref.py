"""Names of models as clients write them: `base`, `base:adapter`, `base:adapter@alias`, `base:adapter@3`."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from loramux.errors import InvalidRequest, ModelNotFound

DEFAULT_ALIAS = "prod"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
"""The grammar of adapter names and aliases; an alias is not all digits besides, because that is a version."""
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_MAX_ECHO_CHARS = 200


@dataclass(frozen=True)
class ModelRef:
    """A parsed model name. Without an adapter it is the base; with one, exactly one of alias and version is set."""

    base: str
    adapter: str | None = None
    alias: str | None = None
    version: int | None = None
    requested: str = field(default="", compare=False)
    """What the client wrote, to be repeated in the response."""


def model_not_found(requested: str) -> ModelNotFound:
    """The one answer for a model that does not exist and for one that the tenant may not use."""
    shown = requested if len(requested) <= _MAX_ECHO_CHARS else requested[:_MAX_ECHO_CHARS] + "..."
    return ModelNotFound(f"The model `{shown}` does not exist, or you do not have access to it.", param="/model")


def parse_model(requested: str, served_names: Collection[str]) -> ModelRef:
    """A served name is matched whole first, else split at the last `:`. Raises `ModelNotFound`."""
    if requested in served_names:
        return ModelRef(base=requested, requested=requested)
    base, _, rest = requested.rpartition(":")
    adapter, at, tag = rest.partition("@")
    if base not in served_names or not NAME.fullmatch(adapter):
        raise model_not_found(requested)
    if not at:
        return ModelRef(base, adapter, alias=DEFAULT_ALIAS, requested=requested)
    if _VERSION.fullmatch(tag):
        return ModelRef(base, adapter, version=int(tag), requested=requested)
    if _is_alias(tag):
        return ModelRef(base, adapter, alias=tag, requested=requested)
    raise model_not_found(requested)


def check_name(name: str) -> None:
    """Raises `InvalidRequest` if `name` can't name an adapter."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(f"an adapter's name must match {NAME.pattern}", param="/name")


def check_alias(alias: str) -> None:
    """Raises `InvalidRequest` if `alias` can't be an alias."""
    if not _is_alias(alias):
        raise InvalidRequest(f"an alias must match {NAME.pattern} and not be a number", param="/alias")


def _is_alias(text: str) -> bool:
    return NAME.fullmatch(text) is not None and not text.isdecimal()
