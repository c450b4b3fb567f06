from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from loramux.adapters.peft_format import raise_if_invalid, validate
from loramux.adapters.peft_tensors import refuse_pickles
from loramux.adapters.types import RegistrationReport
from loramux.errors import AdapterInvalid
from tests.adapters.samples import BASE, MODULES, PREFIX, config_bytes, matrices, tensor_bytes

Q0 = "model.layers.0.self_attn.q_proj"
Q1 = "model.layers.1.self_attn.q_proj"
V0 = "model.layers.0.self_attn.v_proj"


def report_of(ranks: dict[str, int] | None = None, **changes: Any) -> RegistrationReport:
    return validate(config_bytes(**changes), tensor_bytes(ranks), BASE)


def verdict_of(report: RegistrationReport, key: str) -> str:
    return next(verdict.verdict for verdict in report.keys if verdict.key == key)


def test_a_plain_adapter() -> None:
    report = report_of()
    assert report.errors == () and report.warnings == ()
    assert report.tensors_matched == report.tensors_total == 12
    assert report.modules == tuple(sorted(name for name in MODULES if "self_attn" in name))
    assert (report.rank, report.ranks, report.scale) == (4, {}, 4.0)
    assert report.num_bytes == 3 * 4 * 4 * (16 + 24 + 16 + 8)
    assert report.digest.startswith("sha256:")
    raise_if_invalid(report)


def test_a_key_of_every_kind_has_its_verdict() -> None:
    report = report_of(use_rslora=True, lora_dropout=0.1, use_dora=False, revision=None)
    assert verdict_of(report, "use_rslora") == "applied"
    assert verdict_of(report, "lora_dropout") == "ignored"
    assert verdict_of(report, "use_dora") == "ignored"
    assert report.scale == 16 / 2


def test_what_peft_saves_by_default_is_accepted(tmp_path: Any) -> None:
    peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM").save_pretrained(str(tmp_path))
    report = validate((tmp_path / "adapter_config.json").read_bytes(), tensor_bytes(), BASE)
    assert report.errors == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"modules_to_save": ["lm_head"]},
        {"bias": "some"},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": "of next year"},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"megatron_config": {"a": 1}},
        {"trainable_token_indices": [1, 2]},
        {"target_parameters": ["experts.weight"]},
        {"alora_invocation_tokens": [1]},
        {"use_qalora": True},
        {"use_bdlora": {"nblocks": 2}},
        {"arrow_config": {"top_k": 3}},
        {"kasa_config": {"x": 1}},
        {"monteclora_config": {"num_samples": 2}},
        {"ensure_weight_tying": True},
        {"peft_type": "ADALORA"},
        {"task_type": "SEQ_CLS"},
        {"a_key_of_next_year": 1},
    ],
)
def test_features_that_are_not_applied_are_rejected_by_name(changes: dict[str, Any]) -> None:
    report = report_of(**changes)
    (key,) = changes
    assert verdict_of(report, key) == "rejected"
    assert any(key in error for error in report.errors)
    with pytest.raises(AdapterInvalid, match=key) as raised:
        raise_if_invalid(report)
    assert raised.value.details is not None and raised.value.details["report"]["errors"]


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
        {"init_lora_weights": "orthogonal"},
        {"fan_in_fan_out": True},
        {"a_key_of_next_year": None, "another": False, "a_third": [], "a_fourth": {}},
        {"modules_to_save": []},
        {"lora_alpha": 3.5},
        {"target_modules": "all-linear"},
        {"target_modules": None},
        {"target_modules": r".*\.self_attn\.(q|v)_proj"},
    ],
)
def test_harmless_configurations_are_accepted(changes: dict[str, Any]) -> None:
    assert report_of(**changes).errors == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": -4}, "r is -4"),
        ({"r": 4.0}, "r is 4.0"),
        ({"r": True}, "r is True"),
        ({"r": "4"}, "r is '4'"),
        ({"r": 8}, "says rank 8"),
        ({"r": 10**400}, "r is 1000"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
        ({"rank_pattern": [4]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": {"(": 4}}, "can't be used"),
        ({"rank_pattern": {"(?=q)": 4}}, "can't be used"),
        ({"rank_pattern": {"a" * 2000: 4}}, "rank_pattern"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "does not target it"),
        ({"exclude_modules": ["v_proj"]}, "does not target it"),
        ({"layers_to_transform": [0, 1]}, "does not target it"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform"),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0], "layers_pattern": "model|x"}, "does not target it"),
    ],
)
def test_bad_values_are_rejected_by_name(changes: dict[str, Any], named: str) -> None:
    report = report_of(**changes)
    assert any(named in error for error in report.errors), report.errors


def test_a_slow_pattern_is_matched_in_no_time() -> None:
    assert report_of(rank_pattern={r"(.*.*)*x": 4, r"(a|a|aa)+$": 4}).errors == ()


def test_rank_over_the_limit() -> None:
    base = msgspec.structs.replace(BASE, max_lora_rank=3)
    assert any("limit of 3" in error for error in validate(config_bytes(), tensor_bytes(), base).errors)


def test_patterns_follow_pefts_rule() -> None:
    ranks = {Q0: 8, V0: 2, Q1: 4}
    report = report_of(ranks, rank_pattern={r"layers\.0\.self_attn\.q_proj": 8, "v_proj": 2, "proj": 64})
    assert report.errors == ()
    assert (report.rank, report.ranks) == (8, {V0: 2, Q1: 4})


def test_layers_to_transform() -> None:
    assert report_of({Q1: 4}, layers_to_transform=1, target_modules=["q_proj"]).errors == ()
    assert report_of({Q1: 4}, layers_to_transform=[1, 2], layers_pattern="layers", target_modules=["q_proj"]).errors == ()
    assert report_of({Q1: 4}, layers_to_transform=[1], layers_pattern=["h"], target_modules=["q_proj"]).errors
    assert report_of({Q1: 4}, layers_to_transform=0, target_modules=["q_proj"]).errors


def test_a_different_set_of_modules_per_layer() -> None:
    report = report_of({Q0: 4, "model.layers.2.mlp.down_proj": 4}, target_modules=["layers.0.self_attn.q_proj", "layers.2.mlp.down_proj"])
    assert report.errors == () and report.warnings == ()
    assert len(report.modules) == 2


def test_modules_without_tensors_are_a_warning() -> None:
    report = report_of({Q0: 4}, target_modules=["q_proj"])
    assert report.errors == ()
    assert any("2 targeted modules" in warning for warning in report.warnings)


def test_another_base_is_a_warning() -> None:
    report = report_of(base_model_name_or_path="other/model")
    assert report.errors == ()
    assert any("other/model" in warning for warning in report.warnings)


def test_an_adapter_without_effect_is_a_warning() -> None:
    tensors = {name: np.zeros_like(tensor) if "lora_B" in name else tensor for name, tensor in matrices().items()}
    report = validate(config_bytes(), save(tensors), BASE)
    assert report.errors == ()
    assert any("changes nothing" in warning for warning in report.warnings)


def with_tensor(name: str, tensor: np.ndarray, *, instead_of: str | None = None) -> RegistrationReport:
    tensors = matrices()
    if instead_of is not None:
        del tensors[instead_of]
    return validate(config_bytes(target_modules=None), save({**tensors, name: tensor}), BASE)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("base_model.model.lm_head.lora_A.weight", (4, 16), "the base has no such module"),
        ("base_model.model.lm_head.weight", (384, 16), "another matrix than the base's"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 384), "the base has no such module"),
        ("base_model.model.model.layers.0.mlp.down_proj.lora_A.weight", (4, 32), "its B is missing"),
        ("base_model.model.model.layers.0.mlp.down_proj.lora_B.weight", (16, 4), "its A is missing"),
        ("base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector", (16,), "its A is missing"),
        ("base_model.model.model.layers.0.mlp.down_proj.base_layer.lora_A.weight", (4, 32), "the base has no such module"),
        ("base_model.model.model.layers.0.mlp.down_proj.weight", (16, 32), "replaced weights"),
        ("base_model.model.model.layers.0.mlp.down_proj.lora_A", (4, 32), "not a tensor of LoRA"),
        ("base_model.model.model.norm.weight", (16,), "not a tensor of LoRA"),
        ("base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight", (4, 16), "not a tensor of LoRA"),
        ("v_head.summary.weight", (1, 16), "not a tensor of LoRA"),
    ],
)
def test_every_tensor_must_match(name: str, shape: tuple[int, ...], said: str) -> None:
    report = with_tensor(name, np.ones(shape, np.float32))
    assert report.tensors_matched == 12 and report.tensors_total == 13
    assert any(said in error for error in report.errors), report.errors


def test_modules_that_the_base_lacks() -> None:
    tensors = {name.replace("layers.2", "layers.7"): tensor for name, tensor in matrices().items()}
    report = validate(config_bytes(), save(tensors), BASE)
    assert any("model.layers.7.self_attn.q_proj: the base has no such module" in error for error in report.errors)
    report = validate(config_bytes(), save({name.replace("layers", "h"): tensor for name, tensor in matrices().items()}), BASE)
    assert report.tensors_matched == 0
    assert any("no tensor matches" in error for error in report.errors)


def test_no_tensors_at_all() -> None:
    assert any("no tensor matches" in error for error in validate(config_bytes(), save({}), BASE).errors)


@pytest.mark.parametrize(("half", "shape"), [("A", (4, 17)), ("B", (23, 4)), ("A", (5, 16)), ("B", (24, 5)), ("A", (0, 16))])
def test_shapes_must_be_the_bases(half: str, shape: tuple[int, int]) -> None:
    name = f"{PREFIX}{Q0}.lora_{half}.weight"
    report = with_tensor(name, np.ones(shape, np.float32), instead_of=name)
    assert any(Q0 in error for error in report.errors), report.errors


def test_dtypes() -> None:
    name = f"{PREFIX}{Q0}.lora_A.weight"
    assert with_tensor(name, np.ones((4, 16), np.float16), instead_of=name).errors == ()
    report = with_tensor(name, np.ones((4, 16), np.int8), instead_of=name)
    assert any("dtype I8" in error for error in report.errors)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(dtype: type[np.floating[Any]], value: float) -> None:
    name = f"{PREFIX}{Q0}.lora_B.weight"
    tensor = np.ones((24, 4), dtype)
    tensor[7, 2] = value
    assert any("NaN or infinite" in error for error in with_tensor(name, tensor, instead_of=name).errors)


def bfloat16_file(bits: int) -> bytes:
    """One module whose B is full of one bfloat16 value, written by hand because numpy has no such type."""
    a, b = np.ones((4, 16), "<u2") * 0x3F80, np.ones((24, 4), "<u2") * bits
    header = {
        f"{PREFIX}{Q0}.lora_A.weight": {"dtype": "BF16", "shape": [4, 16], "data_offsets": [0, a.nbytes]},
        f"{PREFIX}{Q0}.lora_B.weight": {"dtype": "BF16", "shape": [24, 4], "data_offsets": [a.nbytes, a.nbytes + b.nbytes]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + a.astype("<u2").tobytes() + b.astype("<u2").tobytes()


@pytest.mark.parametrize(("bits", "is_fine"), [(0x3F80, True), (0x7F80, False), (0xFF80, False), (0x7FC0, False), (0x7F81, False)])
def test_bfloat16_values(bits: int, is_fine: bool) -> None:
    report = validate(config_bytes(target_modules=["layers.0.self_attn.q_proj"]), bfloat16_file(bits), BASE)
    assert (report.errors == ()) is is_fine


def test_values_that_the_bases_dtype_cannot_hold() -> None:
    name = f"{PREFIX}{Q0}.lora_B.weight"
    tensors = save({**matrices(), name: np.full((24, 4), 20_000, np.float32)})
    assert validate(config_bytes(), tensors, BASE).errors == ()
    half = msgspec.structs.replace(BASE, dtype="float16")
    assert any("float16" in error for error in validate(config_bytes(), tensors, half).errors)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (b"", "malformed"),
        (b"\x80\x04\x95", "pickle"),
        (b"PK\x03\x04" + b"\0" * 60, "pickle"),
        (struct.pack("<Q", 1 << 40) + b"{}", "malformed"),
        (tensor_bytes()[:-1], "malformed"),
        (tensor_bytes() + b"\0", "malformed"),
    ],
)
def test_files_that_are_not_safetensors(tensors: bytes, said: str) -> None:
    report = validate(config_bytes(), tensors, BASE)
    assert report.digest == "" and any(said in error for error in report.errors)
    assert verdict_of(report, "r") == "applied"


def test_two_tensors_for_one_place() -> None:
    tensors = matrices()
    name = f"{PREFIX}{Q0}.lora_A.weight"
    twin = name.removeprefix(PREFIX)
    assert validate(config_bytes(), save({**tensors, twin: tensors[name]}), BASE) == report_of()
    for other in (tensors[name] + 1, tensors[name].astype(np.float16), tensors[name].reshape(16, 4)):
        report = validate(config_bytes(), save({**tensors, twin: other}), BASE)
        assert any("twice" in error for error in report.errors)


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b"\xff", b'{"r": NaN}', b'{"a":' * 50_000, b" " * (1 << 21)])
def test_files_that_are_not_a_configuration(config: bytes) -> None:
    report = validate(config, tensor_bytes(), BASE)
    assert report.errors and report.digest == ""


def test_pickles_are_refused_by_name() -> None:
    refuse_pickles(["adapter_config.json", "adapter_model.safetensors", "README.md"])
    for name in ("adapter_model.bin", "adapter_model.PT", "x.pth", "x.pkl", "x.ckpt"):
        with pytest.raises(AdapterInvalid, match="pickle"):
            refuse_pickles(["adapter_config.json", name])


def test_a_report_lists_a_bounded_number_of_errors() -> None:
    tensors = {f"base_model.model.x.{i}": np.ones((1, 1), np.float32) for i in range(1000)}
    report = validate(config_bytes(), save(tensors), BASE)
    assert len(report.errors) == 51 and report.errors[-1].startswith("and ")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from(sorted(peft.LoraConfig.__dataclass_fields__)), _JSON, max_size=4))
def test_no_configuration_raises(changes: dict[str, Any]) -> None:
    validate(config_bytes(**changes), tensor_bytes(), BASE)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_no_tensors_file_raises(noise: bytes, position: int) -> None:
    whole = tensor_bytes({Q0: 1})
    validate(config_bytes(), noise, BASE)
    validate(config_bytes(), whole[:position] + noise + whole[position + len(noise) :], BASE)
