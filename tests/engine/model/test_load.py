from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.adapters.types import ModuleShape
from loramux.engine.checkpoint import open_checkpoint
from loramux.engine.model.config import parse_config
from loramux.engine.model.load import choose_dtype, load_model
from loramux.errors import StartupFailed
from loramux.kernels.reference.ops import ReferenceOps
from tests.parity.harness import open_model

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def directory(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "checkpoint"))


def test_sites_and_modules(tiny_llama: Path, tmp_path: Path) -> None:
    model = open_model(tiny_llama, tmp_path)
    assert [site.name for site in model.sites[:4]] == [
        f"model.layers.0.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ]
    assert [site.number for site in model.sites] == list(range(9))
    assert (model.sites[8].name, model.sites[8].in_features) == ("lm_head", 64)
    qkv = model.sites[4]
    assert qkv.in_features == 64
    assert [tuple(part) for part in qkv.slices] == [
        ("model.layers.1.self_attn.q_proj", 0, 64),
        ("model.layers.1.self_attn.k_proj", 64, 96),
        ("model.layers.1.self_attn.v_proj", 96, 128),
    ]
    assert len(model.modules) == 16
    assert model.modules["lm_head"] == ModuleShape(64, 384)
    assert model.modules["model.embed_tokens"] == ModuleShape(384, 64, kind="embedding")
    assert model.modules["model.layers.0.self_attn.v_proj"] == ModuleShape(64, 32)
    assert model.modules["model.layers.1.mlp.up_proj"] == ModuleShape(64, 128)
    assert model.modules["model.layers.1.mlp.down_proj"] == ModuleShape(128, 64)


def test_kv_caches(tiny_llama: Path, tmp_path: Path) -> None:
    model = open_model(tiny_llama, tmp_path, "bfloat16", ReferenceOps())
    caches = model.new_kv_caches(5, 32)
    assert (model.dtype, len(caches)) == (torch.bfloat16, 2)
    assert all(half.shape == (5, 32, 2, 16) and half.count_nonzero() == 0 for cache in caches for half in cache)
    assert sum(half.nbytes for cache in caches for half in cache) == 5 * 32 * model.kv_bytes_per_token()


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[Q_PROJ]


def misshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ][:-1].clone()


def add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q_PROJ.replace("weight", "bias")] = torch.ones(64)


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.int8)


@pytest.mark.parametrize(
    ("spoil", "said"), [(drop, "no tensor"), (misshape, "[63, 64]"), (add_bias, "does not use"), (quantise, "torch.int8")]
)
def test_tensors_that_do_not_fit_are_named(directory: Path, spoil: Callable[[dict[str, torch.Tensor]], None], said: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    spoil(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(StartupFailed) as caught:
        open_model(directory, directory / "cache")
    assert said in caught.value.message
    assert "model.layers.1.self_attn.q_proj" in caught.value.message


def test_a_truncated_file_is_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartupFailed, match=r"model\.safetensors can't be read as safetensors"):
        open_model(directory, directory / "cache")


def test_a_tied_checkpoint_needs_no_head_and_ignores_one(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    open_model(directory, directory / "cache")
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    open_model(directory, directory / "cache")


def test_dtypes(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_llama), tmp_path)
    config = parse_config(checkpoint.config)
    assert choose_dtype("auto", "cuda", config) == torch.float32
    assert choose_dtype("auto", "cpu", config) in (torch.float32, torch.bfloat16)
    assert choose_dtype("float16", "cpu", config) == torch.float16
    with pytest.raises(StartupFailed, match="'int4'"):
        load_model(checkpoint, "cpu", "int4", ReferenceOps())
