"""A checkpoint's config.json as the decoder needs it; whatever the decoder can't run is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loramux.errors import StartupFailed

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_NUMBERS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; fields that a type does not use are None."""

    rope_type: str
    theta: float
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of the decoder."""

    architecture: str
    vocab_size: int
    """Rows of the embedding, padding included."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    sliding_window: int | None
    """Tokens a query sees, itself included; None is all."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    checkpoint_dtype: str | None
    """torch's name of the dtype the weights were saved in, where the configuration says."""


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises `StartupFailed` naming an architecture, rope type or feature that the decoder does not have."""
    architecture = _architecture(raw)
    _refuse_unsupported(raw, architecture)
    hidden_size, num_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    default_kv_heads = num_heads if architecture == "LlamaForCausalLM" else None
    attention_bias = bool(raw.get("attention_bias", False)) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    max_position_embeddings = _integer(raw, "max_position_embeddings")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", default_kv_heads),
        head_dim=_integer(raw, "head_dim", _QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope=_rope(raw, max_position_embeddings),
        sliding_window=(raw.get("sliding_window") or None) if architecture == "MistralForCausalLM" else None,
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        checkpoint_dtype=raw.get("dtype") or raw.get("torch_dtype"),
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        heads = f"{config.num_heads} attention heads over {config.num_kv_heads} key-value heads of size {config.head_dim}"
        raise StartupFailed(f"config.json: {heads} can't be right")
    return config


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or [_ARCHITECTURE_OF_TYPE.get(str(raw.get("model_type")), raw.get("model_type"))]
    if named[0] not in ARCHITECTURES:
        raise StartupFailed(f"architecture {named[0]!r} is not supported; serve one of {', '.join(ARCHITECTURES)}")
    return str(named[0])


def _refuse_unsupported(raw: Mapping[str, Any], architecture: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise StartupFailed(f"config.json: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("mlp_bias"):
        raise StartupFailed("config.json: mlp_bias is not supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise StartupFailed(f"config.json: weights quantised by {method!r} are not supported; serve the unquantised checkpoint or a GGUF")
    if raw.get("use_sliding_window") or _sliding_layers(raw, architecture):
        raise StartupFailed(f"config.json: sliding window layers of {architecture} are not supported; only Mistral's window is")


def _sliding_layers(raw: Mapping[str, Any], architecture: str) -> bool:
    kinds = set(raw.get("layer_types") or ())
    return bool(kinds - ({"sliding_attention"} if architecture == "MistralForCausalLM" else {"full_attention"}))


def _rope(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Both spellings: `rope_scaling` beside `rope_theta`, and transformers 5's `rope_parameters`."""
    given: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in ROPE_TYPES or any(isinstance(value, Mapping) for value in given.values()):
        raise StartupFailed(f"config.json: rope type {rope_type!r} is not supported; the decoder has {', '.join(ROPE_TYPES)}")
    if given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise StartupFailed("config.json: partial_rotary_factor is not supported")
    for name in _ROPE_NUMBERS.get(rope_type, ()):
        if not isinstance(given.get(name), int | float) or given[name] <= 0:
            raise StartupFailed(f"config.json: rope type {rope_type!r} needs a positive number {name!r}")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(given.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        factor=given.get("factor"),
        original_max_position_embeddings=given.get("original_max_position_embeddings")
        or raw.get("original_max_position_embeddings")
        or max_position_embeddings,
        low_freq_factor=given.get("low_freq_factor"),
        high_freq_factor=given.get("high_freq_factor"),
        attention_factor=given.get("attention_factor"),
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
    )


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise StartupFailed(f"config.json: {name} must be a positive integer, not {value!r}")
    return value
