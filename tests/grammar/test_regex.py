"""Expressions that are taken match what Python's `re` matches; the rest is refused."""

from __future__ import annotations

import json
import random
import re

import pytest

from loramux.grammar.constraints import to_grammar
from loramux.grammar.regex import RegexUnsupported, Width, parse, whole, width
from loramux.grammar.types import Constraint
from tests.grammar.matching import accepts, compile_here, compile_schema

EXPRESSIONS = [
    "",
    "a",
    "a|bc|",
    "(a|b)*c",
    "[a-c]{2}",
    "[^a-c]+",
    r"[\]a]",
    "[a-]",
    r"[\w.]+@\w+",
    r"\d{2,3}?",
    r"a{0}b",
    "a{2,}",
    r"x\{3\}",
    r"^\s?\S$",
    "^(?:a|b)$",
    "^a|b$",
    "(?P<n>a)b",
    r"\x61\u0062\n",
    r"[\n\t\"\\]",
    '"',
    "é+",
    "a.c",
]
ALPHABET = 'abcx123 \n\t"\\é.@-]{}3'


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_it_matches_what_python_matches(expression: str) -> None:
    rng = random.Random(expression)
    texts = {"".join(rng.choice(ALPHABET) for _ in range(rng.randrange(6))) for _ in range(400)}
    texts |= {"a", "bc", "abc", "ac", "aéc", "b", "ab\n", "x{3}", "12", "a.b@c", "aa", "éé", '"', "c", ""}
    whole_text = compile_here(Constraint("regex", expression))
    pattern = compile_schema({"type": "string", "pattern": expression})
    for text in sorted(texts):
        assert accepts(whole_text, text) == bool(re.fullmatch(expression, text, re.ASCII)), text
        found = re.search(expression.replace("$", r"\Z"), text, re.ASCII)
        assert accepts(pattern, json.dumps(text, ensure_ascii=False)) == bool(found), text


REFUSED = r"""
(?=a) (?!a) (?<=a) (?<!a) (?i)a (a)\1 \ba \Ba \Da \W \p{L} a++ a*+ a** *a a{3,2} a{,3} (a a) [a [] [b-a] [^\d] a^b $a a(^b) ^* \
\x1 \u12 \ud800 [[:alpha:]] (a{1,1000}){1,1000} a{9999999}
"""


@pytest.mark.parametrize("expression", REFUSED.split())
def test_the_rest_is_refused(expression: str) -> None:
    with pytest.raises(RegexUnsupported):
        whole(parse(expression), search=True)


def test_widths() -> None:
    assert width(parse("a{2,3}(b|cd)?")) == Width(2, 5)
    assert width(parse("^a+$")) == Width(1, None)


def test_pattern_and_length_together_where_one_implies_the_other() -> None:
    grammar = compile_schema({"type": "string", "pattern": "^[A-Z]{3}$", "minLength": 1, "maxLength": 3})
    assert accepts(grammar, '"ABC"') and not accepts(grammar, '"AB"')


def test_text_of_a_choice_is_literal() -> None:
    grammar = compile_here(Constraint("choice", json.dumps(["a.b", 'q"\\', "é😀\n"])))
    assert all(accepts(grammar, text) for text in ("a.b", 'q"\\', "é😀\n"))
    assert not accepts(grammar, "axb")


def test_a_grammar_is_passed_on_as_it_is() -> None:
    assert to_grammar(Constraint("grammar", 'root ::= "a"')) == 'root ::= "a"'
