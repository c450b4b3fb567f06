"""The base's own matrices beside an adapter's, which change nothing if they are the base's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    plain = saved(tmp_path / "plain", tiny_qwen2(), target_modules=["q_proj"])
    whole = saved(tmp_path / "whole", tiny_qwen2(), target_modules=["q_proj"], save_embedding_layers=True)
    assert whole.tensors.keys() - plain.tensors.keys() == {f"{PEFT}{EMBED}.weight", f"{PEFT}{HEAD}.weight"}
    report = check_applied(whole)
    assert report.digest == plain.report(BASE).digest and report.num_bytes == plain.report(BASE).num_bytes


def test_dora_of_an_embedding_that_peft_saves_under_two_names(tmp_path: Path) -> None:
    config: dict[str, Any] = {"target_modules": [EMBED], "use_dora": True}
    once = saved(tmp_path / "once", tiny_qwen2(), **config)
    twice = saved(tmp_path / "twice", tiny_qwen2(), save_embedding_layers=True, **config)
    magnitude = f"{PEFT}{EMBED}.lora_magnitude_vector"
    assert {magnitude, f"{magnitude}.weight"} <= twice.tensors.keys()
    report = twice.report(BASE)
    assert report.errors == () and report.tensors_matched == report.tensors_total == len(twice.tensors) - 1
    assert report.digest == once.report(BASE).digest
    other = twice.with_tensor(f"{magnitude}.weight", twice.tensors[magnitude] + 1)
    assert "twice, under different names" in other.report(BASE).errors[0]


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
