"""Random walks under the masks of real services: whatever is sampled, the finished text fits its schema."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

from loramux.errors import EngineFailed
from loramux.grammar.coverage import refusals
from loramux.grammar.service import WorkerGrammarService
from loramux.grammar.types import CompiledGrammar, Constraint
from loramux.grammar.vocabulary import Vocabulary, read_vocabulary
from tests.grammar.matching import EOS_TOKEN_IDS, VOCAB_SIZE, is_valid
from tests.grammar.random_schemas import random_schema

NUM_SCHEMAS = 120
MAX_TOKENS = 1000
CLOSING = (b'"', b"}", b"]", b'"}', b"0", b"e", b",")


def allowed_tokens(bitmask: torch.Tensor) -> list[int]:
    allowed: list[int] = np.flatnonzero(np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")).tolist()
    return allowed


def walk(grammar: CompiledGrammar, vocabulary: Vocabulary, rng: random.Random, max_tokens: int = MAX_TOKENS) -> str | None:
    """A sampled text, None where it has not ended after `max_tokens`. Prefers tokens that close something."""
    matcher = grammar.new_matcher()
    bitmask = torch.full((3, -(-len(vocabulary.token_bytes) // 32)), -1, dtype=torch.int32)
    legal = {i for i, token in enumerate(vocabulary.token_bytes) if token} | {*vocabulary.eos_token_ids}
    closers = {i for i, token in enumerate(vocabulary.token_bytes) if token in CLOSING}
    written = b""
    for _ in range(max_tokens):
        matcher.fill(bitmask, 1)
        assert bitmask[0].eq(-1).all() and bitmask[2].eq(-1).all()
        allowed = allowed_tokens(bitmask[1])
        assert allowed
        assert legal.issuperset(allowed)
        assert matcher.ended == set(allowed).issubset(vocabulary.eos_token_ids)
        ends = [token_id for token_id in allowed if token_id in vocabulary.eos_token_ids]
        if matcher.ended or (ends and rng.random() < 0.5):
            assert set(ends) == set(vocabulary.eos_token_ids)
            matcher.accept(rng.choice(ends))
            assert matcher.ended
            return written.decode()
        closing = sorted(closers.intersection(allowed))
        token_id = rng.choice(closing if closing and rng.random() < 0.6 else [one for one in allowed if one not in ends])
        matcher.accept(token_id)
        written += vocabulary.token_bytes[token_id]
    return None


@pytest.fixture(scope="module")
def vocabulary(tokenizer_json: Path) -> Vocabulary:
    return read_vocabulary(tokenizer_json, VOCAB_SIZE, EOS_TOKEN_IDS)


def test_sampled_texts_fit_their_schemas(service: WorkerGrammarService, vocabulary: Vocabulary) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_finished = 0
    for _ in range(NUM_SCHEMAS):
        schema = random_schema(rng)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert refusals(schema) == [], schema
        grammar = service.compile(b"salt", Constraint("json_schema", json.dumps(schema))).result(60)
        text = walk(grammar, vocabulary, rng)
        if text is not None:
            num_finished += 1
            assert is_valid(schema, json.loads(text)), (schema, text)
    assert num_finished > NUM_SCHEMAS * 0.8


def test_json_objects(service: WorkerGrammarService, vocabulary: Vocabulary) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    grammar = service.compile(b"salt", Constraint("json_object")).result(60)
    texts = [walk(grammar, vocabulary, rng) for _ in range(20)]
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)
    assert any(text is not None for text in texts)


def test_a_token_that_is_not_allowed_is_an_engine_fault(service: WorkerGrammarService) -> None:
    matcher = service.compile(b"salt", Constraint("json_object")).result(60).new_matcher()
    for token_id in (1, 2, VOCAB_SIZE - 1, VOCAB_SIZE, 10**9, -1):
        with pytest.raises(EngineFailed):
            matcher.accept(token_id)
    with pytest.raises(EngineFailed, match="words"):
        matcher.fill(torch.zeros((1, VOCAB_SIZE // 32), dtype=torch.int32), 0)


def test_matchers_of_one_grammar_are_independent(service: WorkerGrammarService, vocabulary: Vocabulary) -> None:
    grammar = service.compile(b"salt", Constraint("choice", '["ab", "cd"]')).result(60)
    one, other = grammar.new_matcher(), grammar.new_matcher()
    one.accept(vocabulary.token_bytes.index(b"a"))
    other.accept(vocabulary.token_bytes.index(b"c"))
    with pytest.raises(EngineFailed):
        one.accept(vocabulary.token_bytes.index(b"d"))
    one.accept(vocabulary.token_bytes.index(b"b"))
    assert one.ended and not other.ended


def test_the_demo_tokenizer(demo_tokenizer_json: Path) -> None:
    vocabulary = read_vocabulary(demo_tokenizer_json, 49152, (0, 2))
    service = WorkerGrammarService(demo_tokenizer_json, 49152, (0, 2))
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    try:
        for _ in range(3):
            schema = random_schema(rng)
            text = walk(service.compile(b"", Constraint("json_schema", json.dumps(schema))).result(60), vocabulary, rng, 150)
            assert text is None or is_valid(schema, json.loads(text)), (schema, text)
    finally:
        service.close()
