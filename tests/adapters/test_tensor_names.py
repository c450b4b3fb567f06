"""Names as trainers are known to write them, and names of what is no part of the language model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.adapters.tensor_names import parse_name
from tests.adapters.peft_files import BASE, EMBED, EVERYWHERE, PEFT, Q0, Adapter, check_applied, refused, saved, tiny_qwen2

A = "self_attn.q_proj.lora_A.weight"
NORMAL = f"model.layers.0.{A}"

WRAPPED = {
    "peft": f"base_model.model.model.layers.0.{A}",
    "no prefix": f"model.layers.0.{A}",
    "a model without its output layer": f"base_model.model.layers.0.{A}",
    "neither": f"layers.0.{A}",
    "DDP, DeepSpeed": f"module.base_model.model.model.layers.0.{A}",
    "torch.compile": f"_orig_mod.base_model.model.model.layers.0.{A}",
    "torch.compile inside": f"base_model.model._orig_mod.model.layers.0.{A}",
    "torch.compile of each layer": f"base_model.model.model.layers.0._orig_mod.{A}",
    "FSDP": "_fsdp_wrapped_module.base_model.model.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.lora_A._fsdp_wrapped_module.weight",
    "checkpointed activations": f"base_model.model.model.layers.0._checkpoint_wrapped_module.{A}",
    "TRL's value head": f"pretrained_model.base_model.model.model.layers.0.{A}",
    "a multimodal model": f"base_model.model.model.language_model.layers.0.{A}",
    "an older multimodal model": f"base_model.model.language_model.model.layers.0.{A}",
    "a text model": f"base_model.model.model.text_model.layers.0.{A}",
    "peft twice": f"base_model.model.base_model.model.model.layers.0.{A}",
    "an adapter's name": "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "another adapter's name": "base_model.model.model.layers.0.self_attn.q_proj.lora_A.sql-v2.weight",
}


@pytest.mark.parametrize("name", WRAPPED.values(), ids=WRAPPED.keys())
def test_whatever_wraps_it(name: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None and parsed.normal == NORMAL and parsed.module == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "normal"),
    [
        ("model.layers.12.mlp.up_proj.lora_B.x.weight", "model.layers.12.mlp.up_proj.lora_B.weight"),
        ("model.layers.12.mlp.up_proj.lora_B.bias", "model.layers.12.mlp.up_proj.lora_B.bias"),
        ("model.layers.12.mlp.up_proj.lora_B.default.bias", "model.layers.12.mlp.up_proj.lora_B.bias"),
        ("model.layers.12.mlp.up_proj.base_layer.bias", "model.layers.12.mlp.up_proj.bias"),
        ("model.layers.12.mlp.up_proj.bias", "model.layers.12.mlp.up_proj.bias"),
        ("model.layers.1.mlp.up_proj.lora_magnitude_vector", "model.layers.1.mlp.up_proj.lora_magnitude_vector"),
        ("model.layers.1.mlp.up_proj.lora_magnitude_vector.weight", "model.layers.1.mlp.up_proj.lora_magnitude_vector"),
        ("model.layers.1.mlp.up_proj.lora_magnitude_vector.default", "model.layers.1.mlp.up_proj.lora_magnitude_vector"),
        ("model.layers.1.mlp.up_proj.lora_magnitude_vector.default.weight", "model.layers.1.mlp.up_proj.lora_magnitude_vector"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "model.embed_tokens.lora_embedding_A"),
        ("base_model.model.embed_tokens.lora_embedding_B.default", "model.embed_tokens.lora_embedding_B"),
        ("model.language_model.embed_tokens.base_layer.weight", "model.embed_tokens.weight"),
        ("base_model.model.lm_head.lora_A.weight", "lm_head.lora_A.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.lora_magnitude_vector", "lm_head.lora_magnitude_vector"),
    ],
)
def test_every_kind_of_tensor(name: str, normal: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None and parsed.normal == normal == f"{parsed.module}.{parsed.part}"


@pytest.mark.parametrize(
    "name",
    [
        *(f"base_model.model.{tower}.layers.0.{A}" for tower in ("vision_tower", "visual", "model.vision_model.encoder", "audio_tower")),
        *(
            f"base_model.model.{other}.layers.0.{A}"
            for other in ("model.encoder", "encoder", "decoder", "draft", "draft.model", "mtp", "x")
        ),
        f"base_model.model.transformer.h.0.{A}",
        "base_model.model.model.norm.weight",
        "base_model.model.score.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_E",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight.absmax",
        "v_head.summary.weight",
        "lora_A.weight",
        ".weight",
        "",
    ],
)
def test_what_has_no_normal_name(name: str) -> None:
    assert parse_name(name) is None


def test_long_names_take_no_time() -> None:
    start = time.perf_counter()
    for name in (
        "model." * 100_000 + A,
        "lora_A." * 100_000,
        "." * 500_000,
        "base_model.model." * 50_000,
        "lora_magnitude_vector." * 30_000,
    ):
        parse_name(name)
    assert time.perf_counter() - start < 5


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return saved(tmp_path_factory.mktemp("adapter"), tiny_qwen2(), use_dora=True, target_modules=EVERYWHERE)


RENAMINGS = {
    "no prefix": (PEFT, ""),
    "DDP": (PEFT, f"module.{PEFT}"),
    "peft twice": (PEFT, PEFT + PEFT),
    "multimodal": (f"{PEFT}model.", f"{PEFT}model.language_model."),
    "older multimodal": (PEFT, f"{PEFT}language_model."),
    "FSDP": (".self_attn.", "._fsdp_wrapped_module.self_attn."),
    "without the output layer": ("model.layers.", "layers."),
}


@pytest.mark.parametrize(("old", "new"), RENAMINGS.values(), ids=RENAMINGS.keys())
def test_a_renamed_file_is_the_same_adapter(adapter: Adapter, old: str, new: str) -> None:
    assert adapter.renamed(old, new).report(BASE) == check_applied(adapter)


@pytest.mark.parametrize("tower", ["vision_tower", "visual", "audio_tower", "encoder", "draft"])
def test_another_tower_is_never_taken_for_the_language_model(adapter: Adapter, tower: str) -> None:
    assert "not a tensor of LoRA on a layer of a language model" in refused(adapter.renamed("model.layers", f"model.{tower}.layers"))
    name = f"{PEFT}model.{tower}.layers.0.self_attn.q_proj.lora_A.weight"
    assert name.removeprefix(PEFT) in refused(adapter.with_tensor(name, torch.ones(4, 32)))


def test_two_adapters_in_a_file(adapter: Adapter) -> None:
    name = f"{PEFT}{Q0}.lora_A.weight"
    two = adapter.with_tensor(name.replace("lora_A.", "lora_A.other."), adapter.tensors[name] + 1)
    assert "twice, under different names" in refused_to_read(two)


def refused_to_read(adapter: Adapter) -> str:
    (error,) = adapter.report(BASE).errors
    return error


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r"model\.language_model\.layers\.\d\.self_attn\.q_proj"},
        {"target_modules": r"model\.layers\.\d\.self_attn\.q_proj"},
        {"target_modules": ["model.language_model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*vision.*"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1]},
    ],
)
def test_the_configuration_may_use_either_name(tmp_path: Path, config: dict[str, Any]) -> None:
    plain = saved(tmp_path, tiny_qwen2(), target_modules=["q_proj"]).with_keys(**config)
    wrapped = plain.renamed(f"{PEFT}model.", f"{PEFT}model.language_model.")
    assert wrapped.report(BASE).errors == ()


def test_a_module_excluded_by_either_name_is_refused(tmp_path: Path) -> None:
    plain = saved(tmp_path, tiny_qwen2(), target_modules=["q_proj"])
    wrapped = plain.renamed(f"{PEFT}model.", f"{PEFT}model.language_model.")
    for pattern in (r".*language_model.*", r"model\.layers.*"):
        assert "does not target it" in refused(wrapped.with_keys(exclude_modules=pattern))


def test_patterns_for_the_files_names(tmp_path: Path) -> None:
    tail = "language_model.layers.0.self_attn.q_proj"
    plain = saved(tmp_path, tiny_qwen2(), target_modules=["q_proj"], rank_pattern={"layers.0.self_attn.q_proj": 2})
    wrapped = plain.renamed(f"{PEFT}model.", f"{PEFT}model.language_model.").with_keys(rank_pattern={tail: 2}, alpha_pattern={tail: 6})
    bound = wrapped.bound(BASE)
    assert (bound[Q0].rank, bound[Q0].scale) == (2, 3.0)
    assert (bound["model.layers.1.self_attn.q_proj"].rank, bound["model.layers.1.self_attn.q_proj"].scale) == (4, 2.0)


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|o_proj|gate_proj|up_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:k_proj|v_proj|q_proj|out_proj|o_proj|gate_proj|up_proj|down_proj)))"
)


def test_unsloths_pattern(tmp_path: Path) -> None:
    plain = saved(tmp_path, tiny_qwen2(), target_modules=UNSLOTH)
    assert len(check_applied(plain).modules) == 14
    wrapped = plain.renamed(f"{PEFT}model.", f"{PEFT}model.language_model.")
    assert wrapped.report(BASE) == plain.report(BASE)
    assert "does not target it" in refused(
        saved(tmp_path / "e", tiny_qwen2(), target_modules=["embed_tokens"]).with_keys(target_modules=UNSLOTH)
    )
    assert EMBED not in plain.report(BASE).modules
