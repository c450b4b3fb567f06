"""Texts against grammars, byte by byte, and jsonschema as the judge of what is right."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema

from loramux.errors import EngineFailed
from loramux.grammar.constraints import to_grammar
from loramux.grammar.types import CompiledGrammar, Constraint
from loramux.grammar.vocabulary import Vocabulary
from loramux.grammar.xgrammar_backend import Compiler

VOCAB_SIZE = 420
"""The tiny tokenizer's 386 tokens and padding."""
EOS_TOKEN_IDS = (1, 3)
_BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (256,), "bytes")


@cache
def _compiler() -> Compiler:
    return Compiler(_BYTES)


def compile_here(constraint: Constraint) -> CompiledGrammar:
    return _compiler().compile(to_grammar(constraint))


def compile_schema(schema: Any) -> CompiledGrammar:
    return compile_here(Constraint("json_schema", json.dumps(schema)))


def accepts(grammar: CompiledGrammar, text: str | bytes) -> bool:
    """Whether the whole text matches: each byte is allowed, and then the end is."""
    matcher = grammar.new_matcher()
    try:
        for byte in text.encode() if isinstance(text, str) else text:
            matcher.accept(byte)
        matcher.accept(256)
    except EngineFailed:
        return False
    return True


def is_valid(schema: Any, value: Any) -> bool:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(value))
