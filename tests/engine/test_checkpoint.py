from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loramux.engine.checkpoint import open_checkpoint
from loramux.errors import StartupFailed


@pytest.fixture
def directory(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "checkpoint"))


def refusal(model: Path) -> str:
    with pytest.raises(StartupFailed) as caught:
        open_checkpoint(str(model), model.parent / "cache")
    assert "\n" not in caught.value.message
    return caught.value.message


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_directory(directory: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(directory), tmp_path / "cache")
    assert checkpoint.name == "checkpoint"
    assert checkpoint.files_dir == directory
    assert checkpoint.weights == (directory / "model.safetensors",)
    assert checkpoint.vocab_size == 384
    assert checkpoint.eos_token_ids == (0, 2)
    assert checkpoint.digest.startswith("sha256:") and len(checkpoint.digest) == 71
    assert open_checkpoint(str(directory), tmp_path / "another-cache") == checkpoint


def test_digest_follows_the_weights_and_the_configuration(directory: Path, tmp_path: Path) -> None:
    def opened() -> tuple[str, str]:
        checkpoint = open_checkpoint(str(directory), tmp_path / "cache")
        return checkpoint.digest, checkpoint.tokenizer_digest

    first = opened()
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (directory / "model.safetensors").write_bytes(data)
    second = opened()
    edit(directory / "config.json", rms_norm_eps=1e-5)
    third = opened()
    assert len({first[0], second[0], third[0]}) == 3
    assert first[1] == second[1] == third[1]


def test_end_ids_come_from_everywhere(directory: Path, tmp_path: Path) -> None:
    edit(directory / "config.json", eos_token_id=7)
    edit(directory / "generation_config.json", eos_token_id=[9, 8])
    edit(directory / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "special": True})
    assert open_checkpoint(str(directory), tmp_path / "cache").eos_token_ids == (2, 7, 8, 9)
    (directory / "generation_config.json").unlink()
    edit(directory / "config.json", eos_token_id=None)
    edit(directory / "tokenizer_config.json", eos_token=None)
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert open_checkpoint(str(directory), tmp_path / "cache").eos_token_ids == (0,)


def test_what_is_missing_is_named(directory: Path) -> None:
    assert str(directory / "nowhere") in refusal(directory / "nowhere")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    assert "model.safetensors is missing" in refusal(directory)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors is missing" in refusal(directory)


def test_an_index_can_not_point_outside(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "names no file" in refusal(directory)


def test_pickled_weights_are_not_read(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "pickle" in refusal(directory) and "safetensors" in refusal(directory)


def test_no_tokenizer_json(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    assert "no tokenizer.json" in refusal(directory) and "save_pretrained" in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_spoilt_json_is_named(directory: Path, name: str) -> None:
    (directory / name).write_text('{"half": ')
    assert name in refusal(directory)


def test_no_gguf_and_too_many(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "a.gguf").write_bytes(b"not a gguf file at all")
    assert "a.gguf is not a GGUF file" in refusal(models)
    (models / "b.gguf").write_bytes(b"GGUF")
    assert "2 GGUF files" in refusal(models)
    (models / "a.gguf").unlink()
    assert "b.gguf can't be used: it can't be read as GGUF" in refusal(models / "b.gguf")
    assert not any((models / "cache" / "gguf").iterdir())


def test_imports_no_torch() -> None:
    code = "import sys, loramux.engine.checkpoint; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
