"""What matching costs per token, with a real vocabulary: bounded for expressions, refused for grammars where it is not."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loramux.errors import GrammarTooComplex
from loramux.grammar import xgrammar_backend
from loramux.grammar.constraints import to_grammar
from loramux.grammar.ebnf import json_rules
from loramux.grammar.regex import parse
from loramux.grammar.regex_form import simplify
from loramux.grammar.service import WorkerGrammarService
from loramux.grammar.types import Constraint
from loramux.grammar.vocabulary import Vocabulary, read_vocabulary
from loramux.grammar.xgrammar_backend import Compiler, XgrammarGrammar
from tests.grammar.matching import accepts, compile_here, compile_schema

VOCAB_SIZE = 49152
NUM_TOKENS = 500
AMBIGUOUS = [r"(([a-z]*){0,50}){0,50}", r"(\w+\s?)*", r"(([a-z]+)+)+", r"(a|b|ab|[a-z]+)*"]
LENGTHS = [{"maxLength": 100}, {"maxLength": 1000}, {"maxLength": 5000}, {"minLength": 50}, {"minLength": 20, "maxLength": 400}]
EXPONENTIAL = {
    "thirty rules": "".join(f"a{i} ::= a{i + 1} a{i + 1} | [a-z]*\n" for i in range(30)) + "a30 ::= [a-z]*\nroot ::= a0\n",
    "four of itself": "root ::= x x x x\nx ::= x x | [a-z]*\n",
    "nested stars": "root ::= (([a-z]+)+)+\n",
    "a macro": 'root ::= Regex("(([a-z]*){0,50}){0,50}")\n',
}


@pytest.fixture(scope="module")
def vocabulary(demo_tokenizer_json: Path) -> Vocabulary:
    return read_vocabulary(demo_tokenizer_json, VOCAB_SIZE, (0, 2))


@pytest.fixture(scope="module")
def demo_service(demo_tokenizer_json: Path) -> Iterator[WorkerGrammarService]:
    service = WorkerGrammarService(demo_tokenizer_json, VOCAB_SIZE, (0, 2), wall_s=60, cpu_s=6)
    yield service
    service.close()


def walk_s(grammar: XgrammarGrammar, vocabulary: Vocabulary, opening: bytes, num_tokens: int = NUM_TOKENS) -> list[float]:
    """CPU seconds of each token of a long text, whose letters and spaces are picked at random."""
    plain = np.array([re.fullmatch(rb"[a-z]+", token) is not None for token in vocabulary.token_bytes])
    rng = np.random.default_rng(3)
    matcher = grammar.new_matcher()
    if opening:
        matcher.accept(vocabulary.token_bytes.index(opening))
    times = []
    for _ in range(num_tokens):
        begun = time.thread_time()
        mask = matcher.next_mask()
        times.append(time.thread_time() - begun)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool) & plain
        begun = time.thread_time()
        matcher.accept(int(rng.choice(np.flatnonzero(allowed))))
        times[-1] += time.thread_time() - begun
    return times


@pytest.mark.parametrize("expression", AMBIGUOUS)
@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_an_ambiguous_expression_costs_no_more_along_the_text(
    demo_service: WorkerGrammarService, vocabulary: Vocabulary, kind: str, expression: str
) -> None:
    in_json = kind == "json_schema"
    text = json.dumps({"type": "string", "pattern": f"^{expression}$"}) if in_json else expression
    grammar = demo_service.compile(b"", Constraint("json_schema" if in_json else "regex", text)).result(90)
    assert isinstance(grammar, XgrammarGrammar)
    times = walk_s(grammar, vocabulary, b'"' if in_json else b"")
    assert np.median(times[-100:]) < 0.002
    assert sum(times) < 1.0


@pytest.mark.parametrize("bounds", LENGTHS, ids=str)
def test_a_bounded_string_costs_little_per_token(vocabulary: Vocabulary, bounds: dict[str, int]) -> None:
    begun = time.thread_time()
    grammar = Compiler(vocabulary).compile(to_grammar(Constraint("json_schema", json.dumps({"type": "string", **bounds}))))
    assert time.thread_time() - begun < 4.0
    assert grammar.num_bytes < 4_000_000
    times = walk_s(grammar, vocabulary, b'"', num_tokens=bounds.get("maxLength", 400) // 20)
    assert np.median(times) < 0.004


@pytest.mark.parametrize("bounds", [{"maxLength": 60}, {"minLength": 36, "maxLength": 36}, {"minLength": 30}], ids=str)
def test_a_bounded_string_allows_the_tokens_that_plain_counting_does(
    vocabulary: Vocabulary, bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xgrammar_backend, "MAX_CALL_S", 60.0)
    monkeypatch.setattr(xgrammar_backend, "MIN_SPENT_S", 600.0)
    compiler = Compiler(vocabulary)
    made = compiler.compile(to_grammar(Constraint("json_schema", json.dumps({"type": "string", **bounds})))).new_matcher()
    counts = f"{{{bounds.get('minLength', 0)},{bounds.get('maxLength', '')}}}"
    plain_rules = json_rules()
    plain_rules.define("root", rf'"\"" char{counts} "\""')
    plain = compiler.compile(plain_rules.text()).new_matcher()
    no_quotes = np.array([b'"' not in token for token in vocabulary.token_bytes])
    rng = np.random.default_rng(5)
    token_id = vocabulary.token_bytes.index(b'"')
    for _ in range(25):
        made.accept(token_id)
        plain.accept(token_id)
        mask = made.next_mask()
        assert np.array_equal(mask, plain.next_mask())
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool) & no_quotes
        if not allowed.any():
            break
        token_id = int(rng.choice(np.flatnonzero(allowed)))


@pytest.mark.parametrize("grammar", EXPONENTIAL.values(), ids=EXPONENTIAL)
def test_a_grammar_that_becomes_slow_is_refused(demo_service: WorkerGrammarService, grammar: str) -> None:
    with pytest.raises(GrammarTooComplex):
        demo_service.compile(b"", Constraint("grammar", grammar)).result(90)


def test_ordinary_constraints_are_not_slow(demo_service: WorkerGrammarService) -> None:
    constraints = [
        Constraint("json_object"),
        Constraint("regex", r"[\w.+-]+@\w+(\.\w+)+"),
        Constraint("choice", '["yes", "no"]'),
        Constraint("grammar", 'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")"\n'),
        Constraint("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "string", "maxLength": 400}, "b": {}}})),
        Constraint("json_schema", json.dumps({"type": "string", "pattern": "colou?r"})),
        Constraint("json_schema", json.dumps({"type": "string", "format": "date-time"})),
        Constraint("json_schema", json.dumps({"type": "string", "minLength": 1, "maxLength": 1000})),
    ]
    for constraint in constraints:
        assert demo_service.compile(b"", constraint).result(90).num_bytes > 0


def test_a_matcher_that_was_slow_once_fails_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = compile_here(Constraint("regex", "a*")).new_matcher()
    matcher.accept(ord("a"))
    monkeypatch.setattr(xgrammar_backend, "MAX_CALL_S", 0.0)
    with pytest.raises(GrammarTooComplex, match="too much time"):
        matcher.accept(ord("a"))


def test_a_slow_mask_fails_the_next_token(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = "root ::= x x x x\nx ::= x x | [a-z]*\n"
    monkeypatch.setattr(xgrammar_backend, "MAX_CALL_S", 0.02)
    matcher = Compiler(vocabulary).compile(nested).new_matcher()
    with pytest.raises(GrammarTooComplex):
        for _ in range(200):
            matcher.next_mask()
            matcher.accept(vocabulary.token_bytes.index(b"a"))


@pytest.mark.parametrize(
    ("expression", "same"),
    [("(([a-z]*){0,50}){0,50}", "[a-z]*"), ("((a+)+)+", "a+"), ("(a?){3}", "a{0,3}"), ("(a{0,2}){2,3}", "a{0,6}"), ("(a+){2}", "a{2,}")],
)
def test_repetitions_of_repetitions_are_joined(expression: str, same: str) -> None:
    assert simplify(parse(expression)) == simplify(parse(same))


@pytest.mark.parametrize("expression", ["(a{2}){1,2}", "(a{2,3})*", "(a?b?){2}", "((ab?)*c)*", "(a|a|ab)+", "(a{0}b)+", "(){3}a", "a{3}"])
def test_no_repetition_changes_what_matches(expression: str) -> None:
    regex = compile_here(Constraint("regex", expression))
    pattern = compile_schema({"type": "string", "pattern": f"^(?:{expression})$"})
    texts = [format(number, "b").replace("0", "a").replace("1", "b")[1:] for number in range(1, 128)] + ["c", "ac", "abc", "aac", "abcc"]
    for text in texts:
        assert accepts(regex, text) == accepts(pattern, json.dumps(text)) == bool(re.fullmatch(expression, text)), text
