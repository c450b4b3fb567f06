"""Models that several parts' tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
