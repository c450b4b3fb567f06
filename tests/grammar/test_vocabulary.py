"""A token's bytes are what its tokenizer decodes it to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from loramux.errors import StartupFailed
from loramux.grammar.vocabulary import read_vocabulary
from tests.tiny_tokenizer import SPECIAL, byte_level_tokenizer, sentencepiece_tokenizer, write_tokenizer

TEXTS = ['{"name": "Zoë", "n": [1, 2]}', "日本語 😀", "the quick\n\tfox  jumps", "[INST] hello"]


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), sentencepiece_tokenizer()], ids=["byte level", "sentencepiece"])
def test_bytes_join_to_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, tokenizer) / "tokenizer.json"
    vocabulary = read_vocabulary(path, tokenizer.get_vocab_size() + 10, (1,))
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(vocabulary.token_bytes[token_id] for token_id in token_ids).decode().removeprefix(" ") == text


def test_special_tokens_and_padding_have_no_bytes(tokenizer_json: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    size = tokenizer.get_vocab_size()
    vocabulary = read_vocabulary(tokenizer_json, size + 5, (1,))
    assert all(vocabulary.token_bytes[tokenizer.token_to_id(token)] == b"" for token in SPECIAL)
    assert vocabulary.token_bytes[size:] == (b"",) * 5
    assert vocabulary.token_bytes[tokenizer.token_to_id("[INST]")] == b"[INST]"


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "WordPiece", "vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}))
    with pytest.raises(StartupFailed, match="byte-level"):
        read_vocabulary(path, 10, (0,))


def test_the_digest_tells_sizes_and_ends_apart(tokenizer_json: Path) -> None:
    digests = {read_vocabulary(tokenizer_json, size, ends).digest for size, ends in [(400, (1,)), (401, (1,)), (400, (1, 3))]}
    assert len(digests) == 3
