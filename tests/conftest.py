"""Models that several parts' tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from loramux.engine.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete random Llama checkpoint; see `tests/checkpoints.py:save_tiny_llama`."""
    from tests.checkpoints import save_tiny_llama

    directory = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(directory)
    return directory


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file: `LORAMUX_DEMO_MODEL`, or the copy that `loramux demo` fetched."""
    from loramux.gateway.cli.demo_model import demo_model_path

    given = os.environ.get("LORAMUX_DEMO_MODEL")
    path = Path(given) if given else demo_model_path()
    if not given and not path.exists():
        pytest.skip("set LORAMUX_DEMO_MODEL, or run `loramux demo --fetch-only`")
    return path


@pytest.fixture(scope="session")
def demo_checkpoint(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The demo model opened; its tokenizer is converted once for all tests."""
    from loramux.engine.checkpoint import open_checkpoint

    return open_checkpoint(str(demo_model), tmp_path_factory.mktemp("checkpoints"))
