"""How many characters a string may have, at both ends of the bounds, whatever they are written as."""

from __future__ import annotations

import json

import pytest

from loramux.grammar.string_length import BASE, NUM_LAST, STEP
from tests.grammar.matching import accepts, compile_schema

CHARACTERS = ["a", "é", "€", "😀", r"\n", r"\"", r"\u00e9", r"\ud83d\ude00", r"\uD7ff", "\x7f"]
BOUNDS = [
    (0, 0), (0, 1), (3, 3), (2, 5), (0, NUM_LAST), (NUM_LAST, NUM_LAST), (0, NUM_LAST + 1), (NUM_LAST + 1, NUM_LAST + 1), (5, 40),
    (36, 36), (30, 40), (0, 100), (50, 60), (0, STEP + NUM_LAST), (1, STEP + NUM_LAST + 1), (STEP, 2 * STEP + 70), (700, 1000),
]  # fmt: skip


def text(num_characters: int) -> str:
    return '"' + "".join(CHARACTERS[number % len(CHARACTERS)] for number in range(num_characters)) + '"'


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_lengths_are_exact_at_both_ends(low: int, high: int) -> None:
    grammar = compile_schema({"type": "string", "minLength": low, "maxLength": high})
    assert len(json.loads(text(high))) == high
    for length in {*range(max(0, low - 2), low + 3), (low + high) // 2, *range(max(0, high - 2), high + 3)}:
        assert accepts(grammar, text(length)) == (low <= length <= high), length


@pytest.mark.parametrize("high", [BASE * 3, NUM_LAST + BASE, STEP + 3])
def test_every_length_up_to_the_last_is_allowed(high: int) -> None:
    grammar = compile_schema({"type": "string", "maxLength": high})
    assert [length for length in range(high + 20) if accepts(grammar, text(length))] == list(range(high + 1))


@pytest.mark.parametrize("low", [1, 2, BASE, 50, STEP + 1, 1000])
def test_a_least_length_alone_has_no_upper_end(low: int) -> None:
    grammar = compile_schema({"type": "array", "items": {"type": "string", "minLength": low}})
    for length in (low, low + 1, low + 500):
        assert accepts(grammar, f"[{text(length)}, {text(low)}]")
    assert not accepts(grammar, f"[{text(low - 1)}]")
    assert not accepts(grammar, f"[{text(low)}, {text(low - 1)}]")


@pytest.mark.parametrize("character", CHARACTERS)
@pytest.mark.parametrize("length", [2, 30])
def test_a_character_counts_once_however_it_is_written(character: str, length: int) -> None:
    grammar = compile_schema({"type": "string", "minLength": length, "maxLength": length})
    assert [count for count in range(length + 3) if accepts(grammar, f'"{character * count}"')] == [length]


@pytest.mark.parametrize("wrong", ["\x01", r"\x", r"\ud800", r"\udc00", r"\ud800\u0041", r"\u12g4", "\n"])
@pytest.mark.parametrize("bounds", [{"maxLength": 8}, {"maxLength": 300}, {"minLength": 3}, {"minLength": 3, "maxLength": 40}])
def test_what_is_no_character_is_allowed_at_no_place(bounds: dict[str, int], wrong: str) -> None:
    grammar = compile_schema({"type": "string", **bounds})
    assert accepts(grammar, '"abcde"')
    for before in ("", "a", "abcd"):
        assert not accepts(grammar, f'"{before}{wrong}abc"')


def test_a_largest_length_is_a_small_grammar() -> None:
    grammar = compile_schema({"type": "string", "minLength": 1, "maxLength": 1_000_000})
    assert accepts(grammar, text(3000))
    assert not accepts(grammar, text(0))
