"""Random schemas of what is enforced; every one has values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from loramux.grammar.formats import FORMATS

_PATTERNS = ["^[a-z]{2,4}$", "^x-", "[0-9]+$", "^(ab|cd)*$", r"^\d{3}-\d{4}$", r"^[^a-z]\S?$", r'^"\\+$', "q"]
_NAMES = ["a", "ab", "b", "title", "default", "naïve", 'q"t\\', "x/y", "", "日本"]
_CHECKED_FORMATS = [name for name in FORMATS if name in ("date", "uuid", "ipv4", "ipv6", "email")]


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    leaves = [_string, _integer, _number, _fixed, lambda _rng, _depth: {"type": rng.choice(["boolean", "null"])}]
    branches: list[Callable[[random.Random, int], Any]] = [_object, _object, _array, _choice, _reference]
    kinds: list[Callable[[random.Random, int], Any]] = leaves if depth == 0 else branches if depth == 3 else [*leaves, *branches[:-1]]
    schema = rng.choice(kinds)(rng, depth - 1)
    if rng.random() < 0.2:
        schema = {**schema, "description": "d", "title": "t", "default": None}
    return schema


def _string(rng: random.Random, _depth: int) -> Any:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(_CHECKED_FORMATS)}
    low = rng.randrange(4)
    return rng.choice([{"type": "string"}, {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}])


def _integer(rng: random.Random, _depth: int) -> Any:
    low = rng.randrange(-1200, 1200)
    high = low + rng.randrange(2, 300)
    return rng.choice(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": low},
            {"type": "integer", "maximum": high},
            {"type": "integer", "exclusiveMinimum": low, "maximum": high},
            {"type": "integer", "multipleOf": rng.randrange(1, 9)},
            {"type": "integer", "minimum": low, "maximum": low + 60, "multipleOf": 7},
        ]
    )


def _number(rng: random.Random, _depth: int) -> Any:
    low = round(rng.uniform(-20, 20), rng.randrange(4))
    high = low + round(rng.uniform(0.001, 30), rng.randrange(1, 4)) + 0.5
    bounds = [{"minimum": low}, {"exclusiveMaximum": high}, {"minimum": low, "maximum": high}, {"exclusiveMinimum": low, "maximum": high}]
    return {"type": "number", **rng.choice([{}, *bounds])}


def _fixed(rng: random.Random, _depth: int) -> Any:
    values = ["a", 'q"\n', "é", 1, -2.5, None, True, {"k": [1, {"title": "x"}], "l": {}}, [], {}]
    return rng.choice([{"const": rng.choice(values)}, {"enum": rng.sample(values, 3)}, {"enum": ["a", 1, "b"], "type": "string"}])


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(_NAMES, rng.randrange(5))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, max(depth, 0)) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.5]
    extra = rng.randrange(3)
    if extra == 0:
        schema["additionalProperties"] = False
        if len(names) > 1 and rng.random() < 0.5:
            schema["minProperties"] = rng.randrange(len(names))
            schema["maxProperties"] = max(schema["minProperties"], len(schema["required"]), 1)
    elif extra == 1:
        schema["additionalProperties"] = random_schema(rng, 0)
        schema["required"] += ["other"] if rng.random() < 0.3 else []
    return schema


def _array(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.7:
        schema["items"] = random_schema(rng, max(depth, 0))
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, 0) for _ in range(rng.randrange(1, 3))]
    low = rng.randrange(3)
    return {**schema, **rng.choice([{}, {"minItems": low}, {"maxItems": low}, {"minItems": low, "maxItems": low + 2}])}


def _choice(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.3:
        return {"oneOf": [{"type": "string"}, {"type": "integer"}, {"enum": [None, True]}]}
    if rng.random() < 0.3:
        return {"type": ["string", "null", "integer"], "minLength": 1, "maximum": 5}
    return {"anyOf": [random_schema(rng, max(depth, 0)) for _ in range(rng.randrange(1, 4))]}


def _reference(rng: random.Random, _depth: int) -> Any:
    children = {"type": "array", "items": {"$ref": "#/$defs/n~1o de"}, "maxItems": 2}
    node = {"type": "object", "properties": {"v": random_schema(rng, 0), "c": children}, "required": ["v"], "additionalProperties": False}
    return {"$defs": {"n/o de": node}, "type": "object", "properties": {"root": {"$ref": "#/$defs/n~1o%20de"}}, "required": ["root"]}
