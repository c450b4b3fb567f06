"""The base's own matrices beside an adapter's, which change nothing if they are the base's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.adapters.peft_files import BASE, EMBED, HEAD, HIDDEN, PEFT, Q0, Adapter, check_applied, refused, saved, tiny_qwen2


@pytest.fixture
def with_embeddings(tmp_path: Path) -> Adapter:
    return saved(tmp_path, tiny_qwen2(), target_modules=["q_proj", "embed_tokens", "lm_head"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_another_dtype(with_embeddings: Adapter, dtype: torch.dtype) -> None:
    cast = {name: tensor.to(dtype) for name, tensor in with_embeddings.tensors.items()}
    check_applied(Adapter(with_embeddings.keys, cast))


def test_by_either_name(with_embeddings: Adapter) -> None:
    check_applied(with_embeddings.renamed("base_layer.", ""))


def test_beside_adapters_of_other_modules(tmp_path: Path) -> None:
    """`save_embedding_layers=True` writes them whatever is targeted."""
    plain = saved(tmp_path, tiny_qwen2(), target_modules=["q_proj"])
    embedding = tiny_qwen2().state_dict()[f"{EMBED}.weight"]
    report = check_applied(plain.with_tensor(f"{PEFT}{EMBED}.weight", embedding))
    assert report.digest == plain.report(BASE).digest and report.num_bytes == plain.report(BASE).num_bytes


@pytest.mark.parametrize("module", [EMBED, HEAD])
def test_another_matrix(with_embeddings: Adapter, module: str) -> None:
    name = f"{PEFT}{module}.base_layer.weight"
    changed = with_embeddings.tensors[name].clone()
    changed[95, 31] += 1e-3
    longer = torch.cat([with_embeddings.tensors[name], torch.ones(8, HIDDEN)])
    for other in (changed, longer, with_embeddings.tensors[name].T, with_embeddings.tensors[name].to(torch.float64)):
        error = refused(with_embeddings.with_tensor(name, other))
        assert f"{module}.weight" in error and ("replaced embeddings are not supported" in error or "dtype F64" in error)


def test_a_base_that_has_none_or_no_digests(with_embeddings: Adapter) -> None:
    for base in (msgspec.structs.replace(BASE, saved_weight_digests={}), msgspec.structs.replace(BASE, modules={Q0: BASE.modules[Q0]})):
        assert "replaced embeddings are not supported" in refused(with_embeddings, base)


def test_modules_to_save_is_refused_by_name(tmp_path: Path) -> None:
    adapter = saved(tmp_path, tiny_qwen2(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    errors = adapter.report(BASE).errors
    assert any("modules_to_save" in error for error in errors) and any("another matrix" in error for error in errors)
