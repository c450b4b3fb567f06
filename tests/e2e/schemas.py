"""Random schemas of the kind applications send, all of whose instances are short."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "kind", "count", "active", "tags", "size", "owner", "level")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A closed object with one to four properties, all required."""
    names = rng.sample(_NAMES, rng.randrange(1, 5))
    properties = {name: _value(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["enum", "integer", "boolean", "null", "union"] + (["object", "array"] if depth > 0 else [])
    kind = rng.choice(kinds)
    if kind == "enum":
        return {
            "type": "string",
            "enum": rng.sample(["red", "green", "blue", "low", "high", 'a "quoted" word', "naïve"], rng.randrange(1, 4)),
        }
    if kind == "integer":
        low = rng.randrange(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 200)}
    if kind == "union":
        return {"anyOf": [_value(rng, 0), {"type": "null"}]}
    if kind == "array":
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": 1, "maxItems": 3}
    if kind == "object":
        return random_schema(rng, depth)
    return {"type": kind}
