from __future__ import annotations

from typing import Any

import pytest

from loramux.engine.model.config import parse_config
from loramux.errors import StartupFailed

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_defaults_and_derived_sizes() -> None:
    config = parse_config(BASE)
    assert (config.head_dim, config.rms_norm_eps, config.tie_word_embeddings) == (16, 1e-6, False)
    assert (config.rope.rope_type, config.rope.theta) == ("default", 10000.0)
    assert (config.sliding_window, config.qkv_bias, config.o_bias, config.qk_norm) == (None, False, False, False)
    assert parse_config({**BASE, "num_key_value_heads": None}).num_kv_heads == 4


def test_what_sets_the_families_apart() -> None:
    qwen2 = parse_config({**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 99, "use_sliding_window": False})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.sliding_window) == (True, False, None)
    qwen3 = parse_config({**BASE, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.qk_norm, qwen3.head_dim, qwen3.qkv_bias) == (True, 128, False)
    assert parse_config({**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": 99}).sliding_window == 99
    assert parse_config({**BASE, "architectures": None, "model_type": "mistral", "sliding_window": None}).sliding_window is None


def test_the_newer_rope_spelling_wins_and_both_are_read() -> None:
    old = parse_config({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}).rope
    new = parse_config({**BASE, "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}).rope
    assert old == new
    assert (new.rope_type, new.theta, new.factor, new.original_max_position_embeddings) == ("linear", 5e5, 2, 512)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        ({"architectures": None, "model_type": "bert"}, "'bert'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "'low_freq_factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}, "Qwen2ForCausalLM"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]}, "Qwen3ForCausalLM"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}, "num_key_value_heads"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupFailed) as caught:
        parse_config({**BASE, **changes})
    assert named in caught.value.message
    assert "\n" not in caught.value.message
