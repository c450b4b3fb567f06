"""What the server does with each key of an `adapter_config.json`, after peft 0.21's `LoraConfig`.

A key is applied, or ignored because it can't change inference, or rejected by name. A key that is not known is rejected
unless its value is empty, because what it would change is not known either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loramux.adapters.types import KeyVerdict

_APPLIED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    }
)

_APPLIED_IF_SET = frozenset({"lora_bias", "use_dora"})

_IGNORED = {
    "auto_mapping": "names the class that peft wraps",
    "base_model_name_or_path": "compared with the served base to warn",
    "corda_config": "only used to initialise",
    "eva_config": "only used to initialise",
    "fan_in_fan_out": "the base's layers are linear, where peft turns it off too",
    "inference_mode": "only used to train",
    "loftq_config": "only used to initialise",
    "lora_dropout": "dropout is off at inference",
    "lora_ga_config": "only used to initialise",
    "megatron_core": "only used with megatron_config",
    "peft_version": "says who wrote the file",
    "qalora_group_size": "only used with use_qalora",
    "revision": "a label of the base",
    "runtime_config": "only used by peft's own runtime",
    "velora_config": "changes the backward pass only",
}

_REJECTED_UNLESS_EMPTY = {
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "ensure_weight_tying": "adapters that embedding and output layer share are not supported",
    "kasa_config": "KaSA changes the base's weights",
    "layer_replication": "it changes the number of layers",
    "megatron_config": "Megatron layers are not supported",
    "modules_to_save": "replaced modules are not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "target_parameters": "adapters of bare parameters are not supported",
    "trainable_token_indices": "trained token embeddings are not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
}

_HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})


def judge_keys(config: Mapping[str, Any]) -> tuple[KeyVerdict, ...]:
    """One verdict per key, in order of name."""
    return tuple(_judge(key, config[key]) for key in sorted(config))


def _judge(key: str, value: Any) -> KeyVerdict:
    if key in _SPECIAL:
        return _SPECIAL[key](value)
    if key in _APPLIED:
        return KeyVerdict(key, "applied")
    if key in _IGNORED:
        return KeyVerdict(key, "ignored", _IGNORED[key])
    if _is_empty(value):
        return KeyVerdict(key, "ignored", "not set")
    if key in _APPLIED_IF_SET:
        return KeyVerdict(key, "applied")
    return KeyVerdict(key, "rejected", _REJECTED_UNLESS_EMPTY.get(key, "this key is not known"))


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _judge_bias(value: Any) -> KeyVerdict:
    if value in ("none", None):
        return KeyVerdict("bias", "ignored", "no bias was trained")
    if value in ("lora_only", "all"):
        return KeyVerdict("bias", "applied")
    return KeyVerdict("bias", "rejected", f"{_shown(value)} is not none, lora_only or all")


def _judge_init(value: Any) -> KeyVerdict:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.lower() in _HARMLESS_INITS):
        return KeyVerdict("init_lora_weights", "ignored", "only used to initialise")
    return KeyVerdict("init_lora_weights", "rejected", f"{_shown(value)} may change the base's weights; convert the adapter to plain LoRA")


def _judge_peft_type(value: Any) -> KeyVerdict:
    if value == "LORA":
        return KeyVerdict("peft_type", "applied")
    return KeyVerdict("peft_type", "rejected", f"{_shown(value)} is not supported, only LORA is")


def _judge_task_type(value: Any) -> KeyVerdict:
    if value in (None, "CAUSAL_LM"):
        return KeyVerdict("task_type", "ignored", "the base is a causal language model")
    return KeyVerdict("task_type", "rejected", f"{_shown(value)} is not supported, only CAUSAL_LM is")


def _shown(value: Any) -> str:
    return repr(value)[:80]


_SPECIAL: dict[str, Callable[[Any], KeyVerdict]] = {
    "bias": _judge_bias,
    "init_lora_weights": _judge_init,
    "peft_type": _judge_peft_type,
    "task_type": _judge_task_type,
}
