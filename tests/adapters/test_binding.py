"""Each feature as peft 0.21 itself saves it, then with its tensors damaged: applied whole, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.adapters.peft_files import (
    BASE,
    EMBED,
    EVERYWHERE,
    HEAD,
    HIDDEN,
    K1,
    O0,
    PEFT,
    Q0,
    QKVO,
    VOCAB_SIZE,
    Adapter,
    check_applied,
    describe,
    loaded,
    refused,
    saved,
    tiny_qwen2,
    values,
)


@pytest.fixture
def dora(tmp_path: Path) -> Adapter:
    return saved(tmp_path, tiny_qwen2(), use_dora=True, target_modules=QKVO)


def test_dora_is_bound(dora: Adapter) -> None:
    report = check_applied(dora, "use_dora", "target_modules")
    assert (len(report.modules), report.rank, report.tensors_total) == (8, 4, 24)
    module = dora.bound(BASE)[Q0]
    assert (module.kind, module.rank, module.scale) == ("linear", 4, 2.0)
    assert torch.equal(values(module.magnitude), dora.tensors[f"{PEFT}{Q0}.lora_magnitude_vector"])
    assert torch.equal(values(module.a), dora.tensors[f"{PEFT}{Q0}.lora_A.weight"])
    assert torch.equal(values(module.b), dora.tensors[f"{PEFT}{Q0}.lora_B.weight"])


@pytest.mark.parametrize("suffix", [".weight", ".default", ".default.weight", ".another"])
def test_dora_by_any_of_its_names(dora: Adapter, suffix: str) -> None:
    renamed = dora.renamed("lora_magnitude_vector", f"lora_magnitude_vector{suffix}")
    assert renamed.report(BASE) == dora.report(BASE)


@pytest.mark.parametrize("shape", [(HIDDEN, 1), (1, HIDDEN), (1, HIDDEN, 1, 1)])
def test_dora_in_any_shape_of_its_size(dora: Adapter, shape: tuple[int, ...]) -> None:
    name = f"{PEFT}{Q0}.lora_magnitude_vector"
    check_applied(dora.with_tensor(name, dora.tensors[name].view(shape)))


def test_damaged_dora(dora: Adapter) -> None:
    name = f"{PEFT}{Q0}.lora_magnitude_vector"
    assert refused(dora.with_tensor(name, None)) == f"{Q0}: use_dora is set, but its lora_magnitude_vector is missing"
    assert "31 values" in refused(dora.with_tensor(name, torch.ones(31)))
    assert "use_dora is not set" in refused(dora.with_keys(use_dora=False))
    assert "dtype F64" in refused(dora.with_tensor(name, torch.ones(HIDDEN, dtype=torch.float64)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_dora_with_values_that_are_not_finite(dora: Adapter, value: float) -> None:
    name = f"{PEFT}{Q0}.lora_magnitude_vector"
    broken = dora.tensors[name].clone()
    broken[5] = value
    report = dora.with_tensor(name, broken).report(BASE)
    assert report.errors == (f"{Q0}.lora_magnitude_vector: it holds NaN or infinite values",)


def test_dora_with_values_that_the_bases_dtype_cannot_hold(dora: Adapter) -> None:
    name = f"{PEFT}{Q0}.lora_magnitude_vector"
    large = dora.with_tensor(name, torch.full((HIDDEN,), 7e4))
    check_applied(large)
    (error,) = large.report(msgspec.structs.replace(BASE, dtype="float16")).errors
    assert "float16" in error and name.removeprefix(PEFT) in error


@pytest.fixture
def lora_bias(tmp_path: Path) -> Adapter:
    return saved(tmp_path, tiny_qwen2(), lora_bias=True, target_modules=["q_proj", "o_proj"])


def test_lora_bias_is_bound(lora_bias: Adapter) -> None:
    check_applied(lora_bias, "lora_bias")
    for name in (Q0, O0):
        bias = lora_bias.bound(BASE)[name].lora_bias
        assert torch.equal(values(bias), lora_bias.tensors[f"{PEFT}{name}.lora_B.bias"])


def test_lora_bias_with_the_adapters_name(lora_bias: Adapter) -> None:
    assert lora_bias.renamed("lora_B.", "lora_B.default.").report(BASE) == lora_bias.report(BASE)


def test_damaged_lora_bias(lora_bias: Adapter) -> None:
    name = f"{PEFT}{Q0}.lora_B.bias"
    assert refused(lora_bias.with_tensor(name, None)) == f"{Q0}: lora_bias is set, but its lora_B.bias is missing"
    assert "lora_bias is not set" in refused(lora_bias.with_keys(lora_bias=False))
    assert "[31]" in refused(lora_bias.with_tensor(name, torch.ones(31)))
    assert "[32, 1]" in refused(lora_bias.with_tensor(name, torch.ones(HIDDEN, 1)))


def test_lora_bias_with_scaled_values_that_the_bases_dtype_cannot_hold(lora_bias: Adapter) -> None:
    """alpha / r is 2."""
    large = lora_bias.with_tensor(f"{PEFT}{Q0}.lora_B.bias", torch.full((HIDDEN,), 4e4))
    (error,) = large.report(msgspec.structs.replace(BASE, dtype="float16")).errors
    assert error == f"{Q0}.lora_B.bias: 80000 is more than float16 can hold"


def test_lora_bias_not_with_dora(lora_bias: Adapter) -> None:
    (error,) = lora_bias.with_keys(use_dora=True).report(BASE).errors
    assert "lora_bias and use_dora exclude each other" in error


def test_lora_bias_not_on_embeddings(tmp_path: Path) -> None:
    embedding = saved(tmp_path / "a", tiny_qwen2(), target_modules=["embed_tokens"])
    assert refused(embedding.with_keys(lora_bias=True)) == f"{EMBED}: lora_bias is set, which an embedding can't have"


def test_lora_bias_alone_has_an_effect(lora_bias: Adapter) -> None:
    no_b = {name: torch.zeros_like(tensor) if name.endswith("lora_B.weight") else tensor for name, tensor in lora_bias.tensors.items()}
    check_applied(Adapter(lora_bias.keys, no_b))


def test_biases_lora_only(tmp_path: Path) -> None:
    adapter = saved(tmp_path, tiny_qwen2(), bias="lora_only", target_modules=["q_proj", "o_proj"])
    check_applied(adapter, "bias")
    bound = adapter.bound(BASE)
    assert torch.equal(values(bound[Q0].bias), adapter.tensors[f"{PEFT}{Q0}.base_layer.bias"])
    assert bound[O0].bias is None
    older = adapter.renamed("base_layer.bias", "bias")
    assert older.report(BASE) == adapter.report(BASE)


def test_biases_lora_only_with_dora(tmp_path: Path) -> None:
    adapter = saved(tmp_path, tiny_qwen2(), bias="lora_only", use_dora=True, target_modules=["q_proj"])
    check_applied(adapter, "bias", "use_dora")
    module = adapter.bound(BASE)[Q0]
    assert module.magnitude is not None and module.bias is not None


def test_a_bias_that_is_absent_stays_the_bases(tmp_path: Path) -> None:
    """As in peft, whose versions before 0.21 lost these biases on saving."""
    adapter = saved(tmp_path / "a", tiny_qwen2(), bias="lora_only", target_modules=["q_proj"])
    name = f"{PEFT}{Q0}.base_layer.bias"
    without = adapter.with_tensor(name, None)
    check_applied(without)
    assert without.bound(BASE)[Q0].bias is None
    bases = tiny_qwen2().state_dict()[f"{Q0}.bias"]
    assert torch.equal(loaded(tmp_path / "b", without, tiny_qwen2())[name], bases)
    assert torch.equal(loaded(tmp_path / "c", adapter, tiny_qwen2())[name], adapter.tensors[name])


def test_biases_all(tmp_path: Path) -> None:
    adapter = saved(tmp_path, tiny_qwen2(), bias="all", target_modules=["q_proj"])
    report = check_applied(adapter, "bias")
    assert (report.rank, report.ranks[K1], len(report.modules)) == (4, 0, 6)
    module = adapter.bound(BASE)[K1]
    assert (module.a, module.b, module.rank) == (None, None, 0)
    assert torch.equal(values(module.bias), adapter.tensors[f"{PEFT}{K1}.bias"])


def test_damaged_biases(tmp_path: Path) -> None:
    adapter = saved(tmp_path, tiny_qwen2(), bias="all", target_modules=["q_proj"])
    assert "the configuration's bias is lora_only" in refused(adapter.with_keys(bias="lora_only"))
    assert "the configuration's bias is none" in refused(adapter.with_keys(bias="none"))
    assert refused(adapter.with_tensor(f"{PEFT}{O0}.bias", torch.ones(HIDDEN))) == f"{O0}: it has a bias, the base's layer has none"
    assert "[31]" in refused(adapter.with_tensor(f"{PEFT}{K1}.bias", torch.ones(31)))
    assert "not a tensor of LoRA" in refused(adapter.with_tensor(f"{PEFT}model.norm.bias", torch.ones(HIDDEN)))
    norm = f"{PEFT}model.layers.0.input_layernorm.bias"
    assert "the base has no such module" in refused(adapter.with_tensor(norm, torch.ones(HIDDEN)))
    only_biases = {name: tensor for name, tensor in adapter.tensors.items() if "lora_" not in name}
    assert "there is no A with its B" in Adapter(adapter.keys, only_biases).report(BASE).errors[0]


@pytest.fixture(params=[False, True], ids=["plain", "dora"])
def everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Adapter:
    return saved(tmp_path, tiny_qwen2(), use_dora=request.param, target_modules=EVERYWHERE)


def test_embeddings_are_bound(everywhere: Adapter) -> None:
    report = check_applied(everywhere)
    assert {EMBED, HEAD} < set(report.modules) and len(report.modules) == 16
    applied = [tensor for name, tensor in everywhere.tensors.items() if "base_layer" not in name]
    assert report.num_bytes == sum(tensor.nbytes for tensor in applied)
    bound = everywhere.bound(BASE)
    assert (bound[EMBED].kind, bound[HEAD].kind) == ("embedding", "linear")
    assert values(bound[EMBED].a).shape == (4, VOCAB_SIZE) and values(bound[EMBED].b).shape == (HIDDEN, 4)
    assert values(bound[HEAD].a).shape == (4, HIDDEN) and values(bound[HEAD].b).shape == (VOCAB_SIZE, 4)
    for name, size in ((EMBED, HIDDEN), (HEAD, VOCAB_SIZE)):
        assert not everywhere.keys["use_dora"] or values(bound[name].magnitude).shape == (size,)


def test_embeddings_of_a_tied_model(tmp_path: Path) -> None:
    base = describe(tiny_qwen2(tied=True))
    adapter = saved(tmp_path, tiny_qwen2(tied=True), target_modules=EVERYWHERE)
    assert {f"{PEFT}{name}.base_layer.weight" for name in (EMBED, HEAD)} <= adapter.tensors.keys()
    check_applied(adapter, base=base)


def test_embeddings_with_the_adapters_name(everywhere: Adapter) -> None:
    assert everywhere.renamed("embedding_A", "embedding_A.default").report(BASE) == everywhere.report(BASE)


def test_damaged_embeddings(everywhere: Adapter) -> None:
    a, b = f"{PEFT}{EMBED}.lora_embedding_A", f"{PEFT}{EMBED}.lora_embedding_B"
    assert refused(everywhere.with_tensor(a, None)) == f"{EMBED}: its A is missing"
    assert refused(everywhere.with_tensor(b, None)) == f"{EMBED}: its B is missing"
    assert "96 -> 32" in refused(everywhere.with_tensor(a, torch.ones(4, VOCAB_SIZE + 1)))
    assert "says rank 4, but A has 5" in refused(everywhere.with_tensor(a, torch.ones(5, VOCAB_SIZE)))
    assert "says rank 4, but A has 0" in refused(everywhere.with_tensor(a, torch.ones(0, VOCAB_SIZE)))
    assert "not a matrix" in refused(everywhere.with_tensor(a, torch.ones(4, VOCAB_SIZE, 1)))
    assert "which has no lora_A.weight" in refused(everywhere.with_tensor(f"{PEFT}{EMBED}.lora_A.weight", torch.ones(4, HIDDEN)))
    assert "which has no lora_embedding_A" in refused(everywhere.with_tensor(f"{PEFT}{HEAD}.lora_embedding_A", torch.ones(4, HIDDEN)))
    broken = everywhere.tensors[a].clone()
    broken[3, 95] = torch.nan
    assert everywhere.with_tensor(a, broken).report(BASE).errors == (f"{EMBED}.lora_embedding_A: it holds NaN or infinite values",)


def test_embeddings_with_a_rank_over_the_limit(everywhere: Adapter) -> None:
    errors = everywhere.report(msgspec.structs.replace(BASE, max_lora_rank=3)).errors
    assert f"{EMBED}: rank 4 is over the server's limit of 3" in errors


@pytest.mark.parametrize("target", ["all-linear", None])
def test_embeddings_must_be_named(tmp_path: Path, target: str | None) -> None:
    """peft leaves them out where nothing names them."""
    linear = saved(tmp_path / "a", tiny_qwen2(), target_modules="all-linear")
    check_applied(linear.with_keys(target_modules=target))
    for name in ("embed_tokens", "lm_head"):
        adapter = saved(tmp_path / name, tiny_qwen2(), target_modules=[name])
        assert "does not target it" in refused(adapter.with_keys(target_modules=target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True, "use_rslora": True, "target_modules": EVERYWHERE, "rank_pattern": {"embed_tokens": 2, "o_proj": 7}},
        {"target_modules": r".*\.(q|v)_proj", "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj", "embed_tokens"], "exclude_modules": ["layers.0.self_attn.q_proj"], "alpha_pattern": {"q_proj": 3}},
        {"target_modules": QKVO, "layers_to_transform": [1], "lora_bias": True, "bias": "lora_only"},
        {"target_modules": "all-linear", "init_lora_weights": "mica"},
        {"target_modules": QKVO, "init_lora_weights": "orthogonal"},
    ],
)
def test_what_peft_saves_is_accepted_in_every_dtype(tmp_path: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    adapter = saved(tmp_path, tiny_qwen2(), **config)
    cast = Adapter(adapter.keys, {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()})
    report = cast.report(BASE)
    assert report.errors == () and report.tensors_matched == report.tensors_total
    assert set(report.modules) == {name.removeprefix(PEFT).rpartition(".lora_")[0] for name in adapter.tensors if ".lora_" in name}
