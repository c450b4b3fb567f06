"""Regular expressions in the form that xgrammar matches at a constant cost per token.

As EBNF, an expression that can match one text in many ways (`(\\w+\\s?)*`) makes xgrammar's Earley parser keep every way: milliseconds,
then seconds per token. Its `Regex` macro makes one deterministic automaton instead, unless the expression has counted repetitions,
so these are written out here. Where that is too long, the counts stay, as EBNF; what that costs, `vetting.py` finds.
"""

from __future__ import annotations

from loramux.grammar.ebnf import EVERY_CHARACTER, Ranges, json_spelling, literal, plain_in_json, subtract
from loramux.grammar.regex import Alternation, Chars, Node, RegexUnsupported, Repeat, Sequence, to_ebnf

MAX_WRITTEN_OUT = 600
"""Characters of an expression with its counted repetitions written out."""

_HEX = "[0-9a-fA-F]"
_JSON_CHAR = (
    r"(?:%s|\\(?:[\x22\\/bfnrt]|u(?:[0-9abcefABCEF]" + _HEX + _HEX + _HEX + "|[dD][0-7]" + _HEX + _HEX
    + r"|[dD][89abAB]" + _HEX + _HEX + r"\\u[dD][c-fC-F]" + _HEX + _HEX + ")))"
)  # fmt: skip


def to_grammar_body(node: Node, in_json: bool) -> str:
    """The body of an EBNF rule for an expression without anchors, see `to_ebnf`. Raises `RegexUnsupported` where nothing matches."""
    node = simplify(node)
    plain = to_ebnf(node, in_json)  # raises for what matches nothing
    if _length(node) > MAX_WRITTEN_OUT or not _repeats(node):
        return plain
    return f"Regex({literal(to_regex(node, in_json))})"


def simplify(node: Node) -> Node:
    """The same language, with repetitions of repetitions joined where that needs no more than arithmetic."""
    match node:
        case Sequence((only,)) | Alternation((only,)):
            return simplify(only)
        case Sequence(items):
            return Sequence(tuple(simplify(item) for item in items))
        case Alternation(choices):
            return Alternation(tuple(dict.fromkeys(simplify(choice) for choice in choices)))
        case Repeat(item, minimum, maximum):
            return _repeat(simplify(item), minimum, maximum)
    return node


def _repeat(item: Node, minimum: int, maximum: int | None) -> Node:
    if maximum == 0 or item == Sequence(()):
        return Sequence(())
    if (minimum, maximum) == (1, 1):
        return item
    if isinstance(item, Repeat) and item.minimum <= 1:
        most = None if maximum is None or item.maximum is None else maximum * item.maximum
        return Repeat(item.item, item.minimum * minimum, most)
    return Repeat(item, minimum, maximum)


def _repeats(node: Node) -> bool:
    match node:
        case Sequence(parts) | Alternation(parts):
            return any(_repeats(part) for part in parts)
        case Repeat():
            return True
    return False


def _length(node: Node) -> int:
    match node:
        case Sequence(parts) | Alternation(parts):
            return sum(_length(part) for part in parts)
        case Repeat(item, minimum, maximum):
            return _length(item) * max(minimum, maximum or 0, 1)
    return 1


def to_regex(node: Node, in_json: bool) -> str:
    """The expression for xgrammar's `Regex`, without counted repetitions and anchors."""
    match node:
        case Chars(ranges):
            return _characters(ranges, in_json)
        case Sequence(items):
            return "".join(to_regex(item, in_json) for item in items)
        case Alternation(choices):
            return "(?:" + "|".join(to_regex(choice, in_json) for choice in choices) + ")"
        case Repeat(item, minimum, maximum):
            return _repeated(f"(?:{to_regex(item, in_json)})", minimum, maximum)
    raise RegexUnsupported("an anchor inside the expression")


def _repeated(item: str, minimum: int, maximum: int | None) -> str:
    if maximum is None:
        return item * (minimum - 1) + item + "+" if minimum else item + "*"
    return item * minimum + f"(?:{item}" * (maximum - minimum) + ")?" * (maximum - minimum)


def _characters(ranges: Ranges, in_json: bool) -> str:
    if not in_json:
        return _class(subtract(ranges, ((0, 0),)))
    if ranges == EVERY_CHARACTER:
        return _JSON_CHAR % _class(plain_in_json(ranges))
    plain = plain_in_json(ranges)
    choices = [_class(plain)] if plain else []
    escaped = subtract(ranges, plain)
    choices += ["".join(map(_one, json_spelling(code))) for low, high in escaped for code in range(low, high + 1)]
    return choices[0] if len(choices) == 1 else "(?:" + "|".join(choices) + ")"


def _class(ranges: Ranges) -> str:
    return "[" + "".join(_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges) + "]"


def _one(character: str) -> str:
    return _code(ord(character))


def _code(code: int) -> str:
    character = chr(code)
    if character.isascii():
        return character if character.isalnum() else f"\\x{code:02x}"
    return f"\\u{{{code:x}}}"
