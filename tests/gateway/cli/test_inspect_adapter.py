from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loramux.adapters.identity import content_digest
from loramux.gateway.cli.main import app as command
from tests.lora.random_adapters import write_random_adapter


def _inspect(*arguments: object) -> Any:
    return CliRunner().invoke(command, ["adapters", "inspect", *map(str, arguments)])


def _digest(directory: Path) -> str:
    return content_digest((directory / "adapter_config.json").read_bytes(), (directory / "adapter_model.safetensors").read_bytes())


def test_without_a_model_it_tells_keys_and_tensors(tiny_llama: Path, tmp_path: Path) -> None:
    directory = write_random_adapter(tmp_path / "a", tiny_llama, rank=4, modules=("q_proj",), seed=1)
    result = _inspect(directory)
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["errors"] == [] and report["digest"] == _digest(directory)
    assert {"key": "r", "verdict": "applied", "reason": ""} in report["keys"]
    assert [(each["dtype"], each["shape"]) for each in report["tensors"]] == [("F32", [4, 64]), ("F32", [64, 4])] * 2


@pytest.mark.parametrize("changes", [{"modules_to_save": ["lm_head"]}, {"r": 0}])
def test_what_no_base_could_serve_is_invalid(tiny_llama: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = write_random_adapter(tmp_path / "a", tiny_llama, rank=4, modules=("q_proj",), seed=1, config_changes=changes)
    result = _inspect(directory)
    assert result.exit_code == 1 and next(iter(changes)) in " ".join(json.loads(result.stdout)["errors"])


def test_with_a_model_it_is_what_registration_would_report(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_DATA_DIR", str(tmp_path / "data"))
    fits = write_random_adapter(tmp_path / "fits", tiny_llama, rank=4, modules=("q_proj", "down_proj"), seed=1)
    result = _inspect(fits, "--model", tiny_llama)
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["digest"] == _digest(fits)
    assert (report["tensors_matched"], report["tensors_total"], report["rank"]) == (8, 8, 4)
    assert report["modules"][0] == "model.layers.0.mlp.down_proj" and report["warnings"] == []
    too_wide = write_random_adapter(tmp_path / "wide", tiny_llama, rank=4, modules=("q_proj",), seed=1, in_features_delta=1)
    assert _inspect(too_wide).exit_code == 0
    result = _inspect(too_wide, "--model", tiny_llama)
    assert result.exit_code == 1 and "q_proj" in json.loads(result.stdout)["errors"][0]
    assert _inspect(fits, "--model", tiny_llama, "--max-lora-rank", 2).exit_code == 1
    (fits / "added_tokens.json").write_text('{"<new>": 99999}')
    assert "<new>" in json.loads(_inspect(fits, "--model", tiny_llama).stdout)["errors"][0]


def test_what_is_no_adapter_or_no_model_is_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    directory = write_random_adapter(tmp_path / "a", tiny_llama, rank=4, modules=("q_proj",), seed=1)
    for result in (_inspect(tmp_path / "nowhere"), _inspect(tmp_path), _inspect(directory, "--model", tmp_path / "nowhere")):
        assert result.exit_code == 1 and result.stdout == "" and len(result.stderr.splitlines()) == 1
