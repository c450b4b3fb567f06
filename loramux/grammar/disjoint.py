"""Whether no value can match two branches of a `oneOf`, told from types, from finite sets of values, or from a property that every
branch requires with values of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from loramux.grammar.schema_values import EVERY_TYPE, same_value, value_types

Dereference = Callable[[Any], Any]


def are_disjoint(branches: list[Any], dereference: Dereference) -> bool:
    return all(_apart(dereference(one), dereference(other), dereference) for one, other in combinations(branches, 2))


def _apart(one: Any, other: Any, dereference: Dereference) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    finite, other_finite = _finite(one), _finite(other)
    if finite is not None and other_finite is not None:
        return not any(same_value(value, another) for value in finite for another in other_finite)
    if _types(one).isdisjoint(_types(other)):
        return True
    shared = _required(one) & _required(other)
    return any(_apart_by(one["properties"][name], other["properties"][name], dereference) for name in shared)


def _apart_by(one: Any, other: Any, dereference: Dereference) -> bool:
    one, other = dereference(one), dereference(other)
    finite = _finite(one) if isinstance(one, dict) else None
    other_finite = _finite(other) if isinstance(other, dict) else None
    if finite is None or other_finite is None:
        return False
    return not any(same_value(value, another) for value in finite for another in other_finite)


def _finite(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> set[str]:
    """What types a value of this schema can have, `integer` standing for `number` too."""
    finite = _finite(schema)
    if finite is not None:
        return {one for value in finite for one in value_types(value)}
    if "$ref" in schema or not isinstance(schema.get("type", []), str | list):
        return {*EVERY_TYPE}
    named = schema.get("type", EVERY_TYPE)
    types = {named} if isinstance(named, str) else {*named}
    return types | {"number", "integer"} if types & {"number", "integer"} else types


def _required(schema: dict[str, Any]) -> set[str]:
    """Properties that every value of this schema has; none where a value need not be an object."""
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        return set()
    return {name for name in required if isinstance(name, str)} & properties.keys()
