"""A number is matched exactly when it lies within the bounds, compared as decimals."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

from loramux.grammar.coverage import refusals
from loramux.grammar.schema_values import integer_bounds
from tests.grammar.matching import accepts, compile_schema


def _decimal(rng: random.Random) -> str:
    digits = rng.randrange(5)
    scale = rng.choice([1, 10, 100, 10_000])
    return f"{rng.uniform(-scale, scale):.{digits}f}"


def _near(rng: random.Random, bounds: dict[str, Any]) -> list[str]:
    """Numbers at the bounds, just off them, and anywhere."""
    steps = [Decimal(0), Decimal("0.001"), Decimal("0.0000001"), Decimal(1), Decimal(10), Decimal("0.5")]
    edges = [Decimal(repr(bound)) + sign * step for bound in bounds.values() for step in steps for sign in (-1, 1)]
    return [f"{number:f}" for number in edges] + [_decimal(rng) for _ in range(60)]


def _within(value: Decimal, bounds: dict[str, Any]) -> bool:
    as_decimals = {keyword: Decimal(repr(bound)) for keyword, bound in bounds.items()}
    return (
        value >= as_decimals.get("minimum", value)
        and value <= as_decimals.get("maximum", value)
        and ("exclusiveMinimum" not in bounds or value > as_decimals["exclusiveMinimum"])
        and ("exclusiveMaximum" not in bounds or value < as_decimals["exclusiveMaximum"])
    )


def _random_bounds(rng: random.Random, whole: bool) -> dict[str, Any]:
    low = rng.choice([0, float(_decimal(rng)), rng.randrange(-120, 120), 1e-7, -1e-7])
    high = low + rng.choice([0, 0.001, 0.3, 1, 7, 95, 12345, 1e9])
    low, high = (int(low), int(high)) if whole else (low, float(f"{high:.6f}"))
    chosen = {rng.choice(["minimum", "exclusiveMinimum"]): low} if rng.random() < 0.7 else {}
    return chosen | ({rng.choice(["maximum", "exclusiveMaximum"]): high} if rng.random() < 0.7 else {})


def test_numbers() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(150):
        bounds = _random_bounds(rng, whole=False)
        schema = {"type": "number", **bounds}
        if refusals(schema):
            continue
        grammar = compile_schema(schema)
        for text in _near(rng, bounds):
            if not (text.startswith("-") and Decimal(text) == 0):
                assert accepts(grammar, text) == _within(Decimal(text), bounds), (bounds, text)


def test_integers() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(150):
        bounds = _random_bounds(rng, whole=True)
        step = rng.choice([1, 1, 3, 7, 64])
        schema = {"type": "integer", "multipleOf": step, **bounds}
        low, high = integer_bounds(schema)
        if refusals(schema):
            continue
        grammar = compile_schema(schema)
        values = [edge + offset for edge in (low, high) if edge is not None for offset in (-1, 0, 1, 64)]
        values += [rng.randrange(-20_000, 20_000) for _ in range(40)]
        for value in values:
            assert accepts(grammar, str(value)) == (_within(Decimal(value), bounds) and value % step == 0), (schema, value)


def test_bounds_beyond_what_a_double_holds() -> None:
    grammar = compile_schema({"type": "integer", "minimum": 2**53 + 1, "exclusiveMaximum": 10**30})
    assert accepts(grammar, str(2**53 + 1)) and accepts(grammar, str(10**30 - 1))
    assert not accepts(grammar, str(2**53)) and not accepts(grammar, str(10**30))
