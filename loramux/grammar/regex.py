"""Regular expressions as EBNF: the part of ECMA-262 and Python that reads the same in both, everything else refused.

Refused by name: look-around, back-references, word boundaries, \\D, \\W, \\p, possessive quantifiers, flags, and an anchor anywhere but
at the edge of an alternative.
"""

from __future__ import annotations

from typing import NamedTuple

from loramux.grammar.ebnf import (
    EVERY_CHARACTER,
    Ranges,
    any_of,
    character_class,
    contains,
    escapes_in_json,
    plain_in_json,
    subtract,
    union,
)

MAX_SIZE = 20_000
"""Characters of the longest way through the expression with every bounded repetition written out."""
MAX_REPEAT = 100_000


class RegexUnsupported(ValueError):
    """The expression is malformed, or uses what is not in the common part."""


class Chars(NamedTuple):
    ranges: Ranges


class Anchor(NamedTuple):
    at_start: bool


class Sequence(NamedTuple):
    items: tuple[Node, ...]


class Alternation(NamedTuple):
    choices: tuple[Node, ...]


class Repeat(NamedTuple):
    item: Node
    minimum: int
    maximum: int | None


Node = Chars | Anchor | Sequence | Alternation | Repeat

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = union(
    (code, code) for code in [*range(9, 14), 0x20, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]
)
_PERHAPS_SPACE: Ranges = union([*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)])
"""White space to Python or to ECMA-262; \\s is what both agree on, and \\S what neither counts."""
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASS_ESCAPES: dict[str, Ranges] = {"d": _DIGIT, "w": _WORD, "s": _SPACE, "S": subtract(EVERY_CHARACTER, _PERHAPS_SPACE)}
_CONTROL_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def _peek(self, ahead: str = "") -> str:
        if ahead:
            return ahead if self._text.startswith(ahead, self._at) else ""
        return self._text[self._at : self._at + 1]

    def _take(self, expected: str) -> bool:
        if not self._text.startswith(expected, self._at):
            return False
        self._at += len(expected)
        return True

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise RegexUnsupported("the expression ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def parse(self) -> Node:
        node = self._alternation()
        if self._at < len(self._text):
            raise RegexUnsupported("unbalanced parenthesis")
        return node

    def _alternation(self) -> Node:
        choices = [self._sequence()]
        while self._take("|"):
            choices.append(self._sequence())
        return choices[0] if len(choices) == 1 else Alternation(tuple(choices))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._quantified())
        return Sequence(tuple(items))

    def _quantified(self) -> Node:
        item = self._atom()
        bounds = self._quantifier()
        if bounds is None:
            return item
        if isinstance(item, Anchor):
            raise RegexUnsupported("a repeated anchor")
        self._take("?")
        if self._peek() == "+" or self._quantifier() is not None:
            raise RegexUnsupported("a quantifier after a quantifier")
        return Repeat(item, *bounds)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        return self._braces()

    def _braces(self) -> tuple[int, int | None] | None:
        end = self._text.find("}", self._at)
        if self._peek() != "{" or end < 0:
            return None
        low, comma, high = self._text[self._at + 1 : end].partition(",")
        if not _is_count(low) or not (high == "" or _is_count(high)):
            if low.isdigit() or (not low and high.isdigit()):
                raise RegexUnsupported("a repetition that engines read differently")
            return None
        self._at = end + 1
        minimum, maximum = int(low), int(low) if not comma else int(high) if high else None
        if minimum > MAX_REPEAT or (maximum is not None and not minimum <= maximum <= MAX_REPEAT):
            raise RegexUnsupported("a repetition out of bounds")
        return minimum, maximum

    def _atom(self) -> Node:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return Chars(self._class())
        if character == ".":
            return Chars(subtract(EVERY_CHARACTER, _LINE_ENDS))
        if character in "^$":
            return Anchor(character == "^")
        if character == "\\":
            return Chars(self._escape())
        if character in "*+?":
            raise RegexUnsupported("nothing to repeat")
        return Chars(_one(ord(character)))

    def _group(self) -> Node:
        if self._take("?"):
            if self._take("<") or self._take("P<"):
                name = self._text[self._at : self._text.find(">", self._at)] if ">" in self._text[self._at :] else ""
                if not name.isidentifier():
                    raise RegexUnsupported("look-behind, or a malformed group name")
                self._at += len(name) + 1
            elif not self._take(":"):
                raise RegexUnsupported("look-around, flags or another group extension")
        node = self._alternation()
        if not self._take(")"):
            raise RegexUnsupported("unbalanced parenthesis")
        return node

    def _escape(self) -> Ranges:
        character = self._next()
        if character in _CLASS_ESCAPES:
            return _CLASS_ESCAPES[character]
        if character == "0" and self._peek().isdigit():
            raise RegexUnsupported("an octal escape")
        if character in _CONTROL_ESCAPES:
            return _one(_CONTROL_ESCAPES[character])
        if character in "xu":
            return _one(self._hexadecimal(2 if character == "x" else 4))
        if character.isascii() and character.isalnum():
            raise RegexUnsupported(f"the escape \\{character}")
        return _one(ord(character))

    def _hexadecimal(self, num_digits: int) -> int:
        digits = self._text[self._at : self._at + num_digits]
        if len(digits) != num_digits or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            raise RegexUnsupported("a malformed \\x or \\u escape")
        self._at += num_digits
        return int(digits, 16)

    def _class(self) -> Ranges:
        negated = self._take("^")
        if self._peek() == "]":
            raise RegexUnsupported("an empty class, or one that begins with ]")
        members: list[tuple[int, int]] = []
        while not self._take("]"):
            members.extend(self._member(negated))
        return subtract(EVERY_CHARACTER, union(members)) if negated else union(members)

    def _member(self, negated: bool) -> Ranges:
        low = self._class_character(negated)
        if self._peek() != "-" or self._peek("-]"):
            return low
        self._at += 1
        high = self._class_character(negated)
        if not _is_one(low) or not _is_one(high) or low[0][0] > high[0][0]:
            raise RegexUnsupported("a malformed range in a class")
        return subtract(((low[0][0], high[0][0]),), ((0xD800, 0xDFFF),))

    def _class_character(self, negated: bool) -> Ranges:
        character = self._next()
        if character == "[" and self._peek() in (":", "[", "=", "."):
            raise RegexUnsupported("a nested class")
        if character != "\\":
            return _one(ord(character))
        if negated and self._peek() in ("d", "w", "S"):
            raise RegexUnsupported(f"[^\\{self._peek()}], which engines read differently")
        if negated and self._take("s"):
            return _PERHAPS_SPACE
        if self._take("b"):
            return _one(0x08)
        return self._escape()


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 8


def _one(code: int) -> Ranges:
    if not contains(EVERY_CHARACTER, code):
        raise RegexUnsupported("a lone surrogate")
    return ((code, code),)


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def parse(text: str) -> Node:
    """Raises `RegexUnsupported`."""
    try:
        node = _Parser(text).parse()
        if _size(node) > MAX_SIZE:
            raise RegexUnsupported("repetitions that multiply to a size out of bounds")
        return node
    except RecursionError:
        raise RegexUnsupported("nested too deeply") from None


def _size(node: Node) -> int:
    match node:
        case Sequence(items):
            return sum(_size(item) for item in items)
        case Alternation(choices):
            return sum(_size(choice) for choice in choices)
        case Repeat(item, minimum, maximum):
            return _size(item) * max(minimum, maximum or 0, 1)
    return 1


class Width(NamedTuple):
    """How many characters a match has."""

    minimum: int
    maximum: int | None


def width(node: Node) -> Width:
    match node:
        case Chars():
            return Width(1, 1)
        case Anchor():
            return Width(0, 0)
        case Repeat(item, minimum, maximum):
            inner = width(item)
            return Width(inner.minimum * minimum, None if maximum is None or inner.maximum is None else inner.maximum * maximum)
        case Sequence(items):
            widths = [width(item) for item in items]
            return Width(sum(one.minimum for one in widths), _sum([one.maximum for one in widths]))
        case Alternation(choices):
            widths = [width(choice) for choice in choices]
            highs = [one.maximum for one in widths]
            return Width(min(one.minimum for one in widths), None if None in highs else max(high or 0 for high in highs))


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(value or 0 for value in values)


ANYTHING = Repeat(Chars(EVERY_CHARACTER), 0, None)


def whole(node: Node, search: bool) -> Node:
    """The same expression without anchors, to be matched against the whole text. `search` says that the original may match anywhere
    in it, where an anchor does not hold it. Raises `RegexUnsupported` for an anchor inside."""
    match node:
        case Alternation(choices):
            return Alternation(tuple(whole(choice, search) for choice in choices))
        case Sequence((Alternation() | Sequence() as only,)):
            return whole(only, search)
    items = node.items if isinstance(node, Sequence) else (node,)
    at_start = bool(items) and items[0] == Anchor(True)
    items = items[1:] if at_start else items
    at_end = bool(items) and items[-1] == Anchor(False)
    items = items[:-1] if at_end else items
    if any(_has_anchor(item) for item in items):
        raise RegexUnsupported("an anchor inside the expression")
    before = () if at_start or not search else (ANYTHING,)
    after = () if at_end or not search else (ANYTHING,)
    return Sequence((*before, *items, *after))


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Sequence(parts) | Alternation(parts):
            return any(_has_anchor(part) for part in parts)
        case Repeat(item):
            return _has_anchor(item)
    return False


def to_ebnf(node: Node, in_json: bool) -> str:
    """EBNF of an expression without anchors; `in_json` spells its characters as inside a JSON string (rule `char` of `JSON_RULES`).
    Raises `RegexUnsupported` where nothing matches."""
    match node:
        case Chars(ranges):
            return _characters(ranges, in_json)
        case Sequence(items):
            return " ".join(to_ebnf(item, in_json) for item in items) if items else '""'
        case Alternation(choices):
            return any_of([to_ebnf(choice, in_json) for choice in choices])
        case Repeat(item, minimum, maximum):
            inner = to_ebnf(item, in_json)
            return f"({inner}){_braces(minimum, maximum)}" if maximum != 0 else '""'
    raise RegexUnsupported("an anchor inside the expression")


def _braces(minimum: int, maximum: int | None) -> str:
    if maximum is None and minimum <= 1:
        return "+" if minimum else "*"
    return f"{{{minimum},{'' if maximum is None else maximum}}}"


def _characters(ranges: Ranges, in_json: bool) -> str:
    if not in_json:
        ranges = subtract(ranges, ((0, 0),))
        if not ranges:
            raise RegexUnsupported("a class that matches nothing")
        return character_class(ranges)
    if ranges == EVERY_CHARACTER:
        return "char"
    plain = plain_in_json(ranges)
    choices = [character_class(plain)] if plain else []
    choices += escapes_in_json(ranges)
    if not choices:
        raise RegexUnsupported("a class that matches nothing")
    return any_of(choices)
