"""What the value of each keyword must be, as the meta-schema says. A check returns its complaint, or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loramux.grammar.schema_values import EVERY_TYPE

Check = Callable[[Any], str | None]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> str | None:
    if is_number(value) and value >= 0 and int(value) == value:
        return None if value <= 1_000_000 else "is out of bounds"
    return "must be a non-negative integer"


def _number(value: Any) -> str | None:
    return None if is_number(value) else "must be a number"


def _positive(value: Any) -> str | None:
    return None if is_number(value) and value > 0 else "must be a number greater than 0"


def _string(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _schema(value: Any) -> str | None:
    return None if isinstance(value, dict | bool) else "must be a schema"


def _list(value: Any) -> str | None:
    return None if isinstance(value, list) else "must be a list"


def _schemas(value: Any) -> str | None:
    return None if isinstance(value, list) and value else "must be a list of schemas that is not empty"


def _map(value: Any) -> str | None:
    return None if isinstance(value, dict) else "must be an object of schemas"


def _names(value: Any) -> str | None:
    return None if isinstance(value, list) and all(isinstance(name, str) for name in value) else "must be a list of strings"


def _type(value: Any) -> str | None:
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not named or not all(isinstance(one, str) for one in named):
        return "must be a type or a list of types"
    unknown = [one for one in named if one not in EVERY_TYPE]
    return f"{unknown[0]!r} is not a type" if unknown else None


VALUE_CHECKS: dict[str, Check] = {
    "type": _type,
    "$ref": _string,
    "$defs": _map,
    "definitions": _map,
    "enum": _list,
    "anyOf": _schemas,
    "oneOf": _schemas,
    "allOf": _schemas,
    "minLength": _count,
    "maxLength": _count,
    "pattern": _string,
    "format": _string,
    "minimum": _number,
    "maximum": _number,
    "exclusiveMinimum": _number,
    "exclusiveMaximum": _number,
    "multipleOf": _positive,
    "items": _schema,
    "prefixItems": _schemas,
    "minItems": _count,
    "maxItems": _count,
    "uniqueItems": _boolean,
    "properties": _map,
    "patternProperties": _map,
    "propertyNames": _schema,
    "additionalProperties": _schema,
    "required": _names,
    "minProperties": _count,
    "maxProperties": _count,
}
