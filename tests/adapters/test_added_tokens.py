from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from loramux.adapters.peft_format import validate
from tests.adapters.samples import BASE, config_bytes, tensor_bytes
from tests.checkpoints import IM_END, IM_START, SPECIAL_TOKENS, save_tokenizer

IDS = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}


def errors_of(added_tokens: bytes | None) -> tuple[str, ...]:
    base = msgspec.structs.replace(BASE, added_tokens={token: token_id for token_id, token in enumerate(SPECIAL_TOKENS)})
    return validate(config_bytes(), tensor_bytes(), base, added_tokens=added_tokens).errors


@pytest.mark.parametrize("tokens", [{}, IDS, {"<|endoftext|>": 0}])
def test_tokens_that_the_base_has(tokens: dict[str, int]) -> None:
    assert errors_of(None) == errors_of(json.dumps(tokens).encode()) == ()


def test_what_transformers_saves(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    assert errors_of(json.dumps(added).encode()) == ()
    tokenizer.add_tokens(["<|tool|>"])
    added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    assert errors_of(json.dumps(added).encode()) == ("added_tokens.json: '<|tool|>' is not in the base's vocabulary",)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ({"<|new|>": 383}, "'<|new|>' is"),
        ({"<|new|>": 384, **IDS}, "'<|new|>' is"),
        ({"<|im_end|>": IM_START}, "'<|im_end|>' is"),
        ({"<|im_end|>": -1}, "'<|im_end|>' is"),
        ({f"<{i}>": i for i in range(20)}, "'<7>' and 12 more are"),
    ],
)
def test_tokens_that_the_base_has_not(tokens: dict[str, int], named: str) -> None:
    """In the padded rows of the vocabulary too: the base's tokenizer would cut the new token into others."""
    (error,) = errors_of(json.dumps(tokens).encode())
    assert named in error and "not in the base's vocabulary" in error


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"a": "b"}', b'{"a": 1.5}', b'{"a":' * 9999, b"{" + b" " * (1 << 20) + b"}"])
def test_files_that_cannot_be_read(content: bytes) -> None:
    (error,) = errors_of(content)
    assert error.startswith("added_tokens.json")
