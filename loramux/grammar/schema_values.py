"""JSON values as JSON Schema sees them: their types, and the bounds that several keywords give together."""

from __future__ import annotations

from decimal import Decimal
from math import ceil, floor
from typing import Any, NamedTuple

from loramux.grammar.number_range import Bound, as_decimal

EVERY_TYPE = ("object", "array", "string", "number", "integer", "boolean", "null")


def value_types(value: Any) -> set[str]:
    """A number that is whole is an integer too."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}


def values_of_type(values: list[Any], types: tuple[str, ...]) -> list[Any]:
    return [value for value in values if not value_types(value).isdisjoint(types)]


class NumberBounds(NamedTuple):
    low: Bound | None
    high: Bound | None


def number_bounds(schema: dict[str, Any]) -> NumberBounds:
    """The stricter of each pair; an exclusive bound is stricter than an equal one that is not."""
    lows = [Bound(as_decimal(schema[key]), key != "minimum") for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [Bound(as_decimal(schema[key]), key != "maximum") for key in ("maximum", "exclusiveMaximum") if key in schema]
    return NumberBounds(max(lows, default=None), min(highs, key=lambda bound: (bound.value, not bound.exclusive), default=None))


def is_empty_number_range(schema: dict[str, Any]) -> bool:
    low, high = number_bounds(schema)
    if low is None or high is None:
        return False
    return low.value > high.value or (low.value == high.value and (low.exclusive or high.exclusive))


class IntegerBounds(NamedTuple):
    low: int | None
    high: int | None


def integer_bounds(schema: dict[str, Any]) -> IntegerBounds:
    """The least and greatest integer within a schema's bounds."""
    low, high = number_bounds(schema)
    least = None if low is None else (floor(low.value) + 1 if low.exclusive else ceil(low.value))
    greatest = None if high is None else (ceil(high.value) - 1 if high.exclusive else floor(high.value))
    return IntegerBounds(least, greatest)


def same_value(one: Any, other: Any) -> bool:
    """Equality as JSON Schema has it: 1 is 1.0, but true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return Decimal(one) == Decimal(other)
    return type(one) is type(other) and bool(one == other)
