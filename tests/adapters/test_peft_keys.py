"""Every key of peft's configuration has a deliberate verdict, and what peft writes with it is judged as it says."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any, Literal

import peft
import pytest
import torch
from peft import get_peft_model

from loramux.adapters.peft_keys import judge_keys
from tests.adapters.peft_files import BASE, EMBED, HEAD, PEFT, Adapter, check_applied, read, saved, tiny_qwen2, values

Verdict = Literal["applied", "ignored", "rejected"]

SET: dict[str, tuple[Any, Verdict]] = {
    "task_type": ("SEQ_CLS", "rejected"),
    "peft_type": ("LORA", "applied"),
    "auto_mapping": ({"base_model_class": "LlamaForCausalLM"}, "ignored"),
    "peft_version": ("0.21.2", "ignored"),
    "base_model_name_or_path": ("org/base", "ignored"),
    "revision": ("main", "ignored"),
    "inference_mode": (True, "ignored"),
    "r": (4, "applied"),
    "target_modules": (["q_proj"], "applied"),
    "exclude_modules": (["k_proj"], "applied"),
    "lora_alpha": (8, "applied"),
    "lora_dropout": (0.1, "ignored"),
    "fan_in_fan_out": (True, "ignored"),
    "bias": ("lora_only", "applied"),
    "use_rslora": (True, "applied"),
    "modules_to_save": (["lm_head"], "rejected"),
    "init_lora_weights": ("pissa", "rejected"),
    "layers_to_transform": ([0], "applied"),
    "layers_pattern": (["layers"], "applied"),
    "rank_pattern": ({"q_proj": 8}, "applied"),
    "alpha_pattern": ({"q_proj": 8}, "applied"),
    "megatron_config": ({"a": 1}, "rejected"),
    "megatron_core": ("megatron.core", "ignored"),
    "trainable_token_indices": ([1], "rejected"),
    "loftq_config": ({"loftq_bits": 4}, "ignored"),
    "eva_config": ({"rho": 2.0}, "ignored"),
    "corda_config": ({"corda_method": "ipm"}, "ignored"),
    "lora_ga_config": ({"direction": "ArBr"}, "ignored"),
    "use_dora": (True, "applied"),
    "velora_config": ({"num_groups": 2}, "ignored"),
    "alora_invocation_tokens": ([1, 2], "rejected"),
    "use_qalora": (True, "rejected"),
    "qalora_group_size": (16, "ignored"),
    "monteclora_config": ({"num_samples": 2}, "rejected"),
    "layer_replication": ([[0, 2], [1, 3]], "rejected"),
    "runtime_config": ({"ephemeral_gpu_offload": True}, "ignored"),
    "lora_bias": (True, "applied"),
    "target_parameters": (["experts.weight"], "rejected"),
    "use_bdlora": ({"nblocks": 2}, "rejected"),
    "arrow_config": ({"top_k": 3}, "rejected"),
    "kasa_config": ({"beta": 1.0}, "rejected"),
    "ensure_weight_tying": (True, "rejected"),
}
"""A value of each key that says something, and what becomes of it."""


def test_every_key_of_peft_has_its_verdict() -> None:
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == SET.keys()


@pytest.mark.parametrize("key", SET)
def test_a_key_that_is_set(key: str) -> None:
    value, expected = SET[key]
    (verdict,) = judge_keys({key: value})
    assert verdict.verdict == expected
    assert "not known" not in verdict.reason


def test_no_default_is_rejected(tmp_path: Path) -> None:
    peft.LoraConfig(task_type="CAUSAL_LM").save_pretrained(str(tmp_path))
    keys = json.loads((tmp_path / "adapter_config.json").read_text())
    assert keys.keys() >= SET.keys() - {"runtime_config"}
    assert [verdict for verdict in judge_keys(keys) if verdict.verdict == "rejected"] == []


@pytest.mark.parametrize("features", [{"use_dora": True}, {"lora_bias": True}, {"bias": "lora_only"}, {"use_rslora": True}])
def test_a_feature_is_told_as_applied(tmp_path: Path, features: dict[str, Any]) -> None:
    check_applied(saved(tmp_path, tiny_qwen2(), target_modules=["q_proj"], **features), *features)


def test_an_older_file_gets_pefts_defaults(tmp_path: Path) -> None:
    """As peft 0.3 wrote it."""
    adapter = saved(tmp_path, tiny_qwen2(), r=8, target_modules=["q_proj", "v_proj"])
    keys = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"], "enable_lora": None, "merge_weights": False, "bias": "none"}
    older = Adapter(keys, adapter.tensors)
    report = check_applied(older)
    assert (report.rank, report.scale) == (8, 1.0)
    assert older.bound(BASE).keys() == adapter.bound(BASE).keys()


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_an_initialisation_that_changes_the_base_is_rejected(tmp_path: Path, init: str) -> None:
    adapter = saved(tmp_path, tiny_qwen2(), target_modules=["q_proj"], init_lora_weights=init)
    assert adapter.report(BASE).errors == (
        f"adapter_config.json: init_lora_weights is rejected: '{init}' may change the base's weights; convert the adapter to plain LoRA",
    )


@pytest.mark.parametrize("init", ["corda", "loftq", "lora_ga", "PiSSA", "Olora", "of next year"])
def test_other_initialisations_are_rejected_too(tmp_path: Path, init: str) -> None:
    adapter = saved(tmp_path, tiny_qwen2(), target_modules=["q_proj"])
    (error,) = adapter.with_keys(init_lora_weights=init).report(BASE).errors
    assert "init_lora_weights is rejected" in error


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_converted_adapter_is_plain_lora(tmp_path: Path, init: str) -> None:
    """peft subtracts what it took out of the base: on the untouched base the file gives the trained weights."""
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(
            tiny_qwen2(), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=init)
        )
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(str(tmp_path / "initial"))
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.peft_config["default"].init_lora_weights = init
        model.save_pretrained(str(tmp_path / "converted"), path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    converted = read(tmp_path / "converted")
    check_applied(converted)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    trained = layer.base_layer.weight + layer.get_delta_weight("default")
    bound = converted.bound(BASE)["model.layers.0.self_attn.q_proj"]
    assert bound.rank == 8
    ours = tiny_qwen2().state_dict()["model.layers.0.self_attn.q_proj.weight"] + bound.scale * values(bound.b) @ values(bound.a)
    torch.testing.assert_close(ours, trained.detach(), rtol=1e-4, atol=1e-5)


def test_tied_adapters_are_rejected(tmp_path: Path) -> None:
    adapter = saved(tmp_path, tiny_qwen2(tied=True), target_modules=["embed_tokens"], ensure_weight_tying=True)
    assert {f"{PEFT}{EMBED}.lora_embedding_A", f"{PEFT}{HEAD}.lora_A.weight"} <= adapter.tensors.keys()
    assert any("ensure_weight_tying is rejected" in error for error in adapter.report(BASE).errors)
