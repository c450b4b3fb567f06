"""A tokenizer with special tokens, padding and two end-of-sequence ids, and a service over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loramux.grammar.service import WorkerGrammarService
from tests.grammar.matching import EOS_TOKEN_IDS, VOCAB_SIZE
from tests.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

if TYPE_CHECKING:
    from loramux.engine.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer()) / "tokenizer.json"


@pytest.fixture(scope="module")
def service(tokenizer_json: Path) -> Iterator[WorkerGrammarService]:
    service = WorkerGrammarService(tokenizer_json, VOCAB_SIZE, EOS_TOKEN_IDS)
    yield service
    service.check_integrity()
    service.close()


@pytest.fixture(scope="session")
def demo_tokenizer_json(demo_checkpoint: Checkpoint) -> Path:
    return demo_checkpoint.files_dir / "tokenizer.json"
