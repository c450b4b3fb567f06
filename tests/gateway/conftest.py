from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_tokenizer_dir(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer files."""
    from loramux.engine.checkpoint import open_checkpoint

    return open_checkpoint(str(demo_model), tmp_path_factory.mktemp("checkpoints")).files_dir
