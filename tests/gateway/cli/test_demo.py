from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from loramux.errors import StartupFailed
from loramux.gateway.cli.demo import Examples, find_examples, invitation, run_demo
from loramux.gateway.cli.demo_model import demo_model_path


def test_a_clone_has_its_examples_beside_the_package() -> None:
    assert [adapter.name for adapter in find_examples(None).adapters] == ["pirate", "sql", "tickets"]


def test_a_directory_without_adapters_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match=r"No demo adapters in .*--examples"):
        find_examples(tmp_path)


def test_missing_examples_end_the_command_before_anything_is_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(8000, tmp_path / "data", tmp_path) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("loramux: No demo adapters") and captured.err.count("\n") == 1
    assert not demo_model_path(tmp_path / "data").parent.exists()


def test_the_printed_request_survives_a_shell(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "It's \"late\", $HOME `x` \\ and 'quoted'"}]}
    (tmp_path / "request.json").write_text(json.dumps(body))
    words = shlex.split(invitation("http://127.0.0.1:8000", "lmx_demo.1_2", Examples(tmp_path)))
    assert json.loads(words[words.index("-d") + 1]) == body
    assert "KEY=lmx_demo.1_2" in words
