"""GGUF files written by the gguf library, of each architecture, against the transformers model they were written from."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loramux.engine.checkpoint import Checkpoint
from loramux.engine.convert_gguf import config_of, end_ids
from loramux.engine.model.config import RopeConfig, parse_config
from loramux.engine.model.load import load_model
from loramux.engine.model.rope import rope_frequencies
from loramux.errors import StartupFailed
from loramux.kernels.reference.ops import ReferenceOps
from tests.checkpoints import save_model
from tests.parity.harness import logits

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "<|eot_id|>"]
TOKEN_TYPES = [TokenType.CONTROL, TokenType.CONTROL, TokenType.CONTROL, TokenType.NORMAL, TokenType.NORMAL]


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter does for Llama's q and k."""
    return rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: PreTrainedModel, kind: GGMLQuantizationType) -> None:
    """Write the model with its matrices as `kind`, and put what they dequantise to back into the model."""
    config = model.config
    writer = GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list(TOKENS)
    writer.add_token_types(TOKEN_TYPES)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if config.model_type == "llama" else {}
    for name, parameter in model.named_parameters():
        module, _, ending = name.rpartition(".")
        values = parameter.detach().numpy()
        of = kind if values.ndim == 2 else GGMLQuantizationType.F32
        parameter.data = torch.tensor(dequantize(quantize(values, of), of))
        num_heads = heads.get(module.rpartition(".")[2])
        written = quantize(values if num_heads is None else permuted(values, num_heads), of)
        writer.add_tensor(f"{names.get_name(module)}.{ending}", written, raw_dtype=of)
    if config.rope_parameters["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def checkpoint_of(path: Path) -> Checkpoint:
    config = config_of(GGUFReader(path))
    return Checkpoint("tiny", path.parent, (path,), config, config["vocab_size"], "sha256:", "sha256:", (2,))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES, tie_word_embeddings=True),
    ],
    ids=["llama", "llama3-tied", "qwen2", "qwen3-tied"],
)
def test_logits_equal_transformers(tmp_path: Path, config: PretrainedConfig, kind: GGMLQuantizationType) -> None:
    theirs = save_model(tmp_path, config)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, theirs, kind)
    prompt = [random.Random(5).randrange(SIZES["vocab_size"]) for _ in range(90)]
    (got,) = logits(load_model(checkpoint_of(path), "cpu", "float32", ReferenceOps()), [prompt])
    with torch.no_grad():
        want = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_hyperparameters_equal_the_configuration_written(tmp_path: Path) -> None:
    config = Qwen3Config(**SIZES, tie_word_embeddings=True, rms_norm_eps=2.0**-20)
    write_gguf(tmp_path / "tiny.gguf", save_model(tmp_path, config), GGMLQuantizationType.F16)
    reader = GGUFReader(tmp_path / "tiny.gguf")
    want = parse_config({**config.to_dict(), "architectures": ["Qwen3ForCausalLM"]})
    assert parse_config(config_of(reader)) == replace(want, checkpoint_dtype=None)
    assert end_ids(reader) == [0, 2]


def rope_of(path: Path, scaling: dict[str, str | float]) -> RopeConfig:
    """What the decoder gets from a file with these `rope.scaling` entries."""
    writer = GGUFWriter(path, "qwen2")
    for name, value in {"block_count": 2, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96}.items():
        writer.add_uint32(f"qwen2.{name}", value)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, value in scaling.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"qwen2.rope.scaling.{name}", value)  # type: ignore[operator]
    writer.add_tensor("token_embd.weight", np.zeros((160, 64), dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return parse_config(config_of(GGUFReader(path))).rope


def test_yarn_scales_as_in_llama_cpp(tmp_path: Path) -> None:
    """cos and sin are multiplied by attn_factor * (0.1 ln(factor) + 1)."""
    yarn: dict[str, str | float] = {"type": "yarn", "factor": 4.0, "original_context_length": 64.0}
    for attn_factor, expected in ((None, 1.138629436), (1.0, 1.138629436), (0.5, 0.569314718)):
        given = yarn if attn_factor is None else yarn | {"attn_factor": attn_factor}
        rope = rope_of(tmp_path / "tiny.gguf", given | {"yarn_beta_fast": 16.0, "yarn_log_multiplier": 0.0})
        assert rope_frequencies(rope, 16).attention_factor == pytest.approx(expected, abs=1e-8)
        assert (rope.beta_fast, rope.beta_slow, rope.original_max_position_embeddings) == (16.0, 1.0, 64)


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.1}, "yarn_log_multiplier 0.1"),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor 0.5"),
        ({"type": "yarn", "factor": 4.0, "yarn_attn_factor": 2.0}, "yarn_attn_factor 2"),
        ({"type": "linear", "factor": 4.0, "attn_factor": 1.5}, "attn_factor 1.5"),
        ({"attn_factor": 1.5}, "attn_factor 1.5"),
    ],
)
def test_a_rope_scale_the_decoder_has_not_is_refused_by_name(tmp_path: Path, scaling: dict[str, str | float], name: str) -> None:
    with pytest.raises(StartupFailed, match=f"rope.scaling.{name} is not supported"):
        rope_of(tmp_path / "tiny.gguf", scaling)


def test_a_truncated_or_strange_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, save_model(tmp_path, LlamaConfig(**SIZES)), GGMLQuantizationType.F32)
    whole = checkpoint_of(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(StartupFailed, match=r"tiny\.gguf can't be read as GGUF"):
        load_model(whole, "cpu", "float32", ReferenceOps())
    writer = GGUFWriter(path, "gpt2")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    with pytest.raises(StartupFailed, match="'gpt2'"):
        config_of(GGUFReader(path))
