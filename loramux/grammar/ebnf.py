"""xgrammar's EBNF as text: literals, character classes, a table of rules, and the rules of JSON itself.

Character sets are sorted, disjoint, inclusive ranges of code points; surrogates are in none.
"""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]

EVERY_CHARACTER: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
CONTROL: Ranges = ((0, 0x1F),)
_NOT_PLAIN: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def subtract(ranges: Ranges, removed: Ranges) -> Ranges:
    kept: list[tuple[int, int]] = []
    for low, high in ranges:
        for cut_low, cut_high in removed:
            if cut_high < low or cut_low > high:
                continue
            if cut_low > low:
                kept.append((low, cut_low - 1))
            low = cut_high + 1
        if low <= high:
            kept.append((low, high))
    return tuple(kept)


def intersect(ranges: Ranges, other: Ranges) -> Ranges:
    return subtract(ranges, subtract(EVERY_CHARACTER, other))


def contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _escaped(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def literal(text: str) -> str:
    """The EBNF literal that matches `text` alone; `text` is not empty and holds no NUL."""
    return '"' + "".join(_escaped(ord(character)) for character in text) + '"'


def character_class(ranges: Ranges) -> str:
    return "[" + "".join(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges) + "]"


def any_of(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else "(" + " | ".join(choices) + ")"


def json_spelling(code: int) -> str:
    """The one spelling of a character inside a JSON string that is used where spelling matters: itself if it can be, else an escape."""
    if not contains(_NOT_PLAIN, code):
        return chr(code)
    return "\\" + _SHORT_ESCAPES[code] if code in _SHORT_ESCAPES else f"\\u{code:04x}"


def plain_in_json(ranges: Ranges) -> Ranges:
    return subtract(ranges, _NOT_PLAIN)


def escapes_in_json(ranges: Ranges) -> list[str]:
    """EBNF alternatives for the characters of a set that need an escape in a JSON string, each in its one spelling."""
    codes = [code for low, high in intersect(ranges, _NOT_PLAIN) for code in range(low, high + 1)]
    spelled = [json_spelling(code) for code in codes]
    by_prefix: dict[str, list[str]] = {}
    for text in spelled:
        by_prefix.setdefault(text[:-1], []).append(text[-1])
    return [f"{literal(prefix)} {_class_of(last)}" for prefix, last in by_prefix.items()]


def _class_of(characters: list[str]) -> str:
    return character_class(union((ord(character), ord(character)) for character in characters))


class RuleTable:
    """Rules by name, in order; `root` is where a match starts."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._num_made = 0

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def define(self, name: str, body: str) -> str:
        self._rules[name] = body
        return name

    def fresh(self, stem: str) -> str:
        self._num_made += 1
        return f"{stem}_{self._num_made}"

    def text(self) -> str:
        return "".join(f"{name} ::= {body}\n" for name, body in self._rules.items())


WHITESPACE = r'"" | " " | "\n" [ \t]{0,16}'
"""Between JSON tokens: nothing, a space, or a line break and its indentation. A model that likes whitespace runs out of it.
Each step of the bound costs 130 kB and 1 ms of compilation with 49k tokens."""

PLAIN_CHARACTER = character_class(plain_in_json(EVERY_CHARACTER))
_UNICODE_ESCAPE = (
    "[0-9abcefABCEF] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] | [dD] [0-7] [0-9a-fA-F] [0-9a-fA-F]"
    r' | [dD] [89abAB] [0-9a-fA-F] [0-9a-fA-F] "\\u" [dD] [c-fC-F] [0-9a-fA-F] [0-9a-fA-F]'
)

JSON_RULES = {
    "ws": WHITESPACE,
    "comma": '"," ws',
    "colon": '" "? ":" ws',
    "escape": r'["\\/bfnrt] | "u" unicode',
    "unicode": _UNICODE_ESCAPE,
    "char": rf'{PLAIN_CHARACTER} | "\\" escape',
    "string": r'"\"" string_rest',
    "string_rest": rf'"\"" | {PLAIN_CHARACTER} string_rest | "\\" escape string_rest',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "integer": '"0" | "-"? [1-9] [0-9]*',
    "number": '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9]{1,3})?',
    "member": "string colon any ws",
    "object": '"{" ws (member (comma member)*)? "}"',
    "array": '"[" ws (any ws (comma any ws)*)? "]"',
    "any": "object | array | string | number | boolean | null",
}
"""RFC 8259 with bounded whitespace. Strings hold whole characters: no lone surrogate, escaped or not, and no control character."""


def json_rules() -> RuleTable:
    table = RuleTable()
    for name, body in JSON_RULES.items():
        table.define(name, body)
    return table
