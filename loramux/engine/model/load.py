"""A checkpoint into a running decoder: device, dtype, weights, LoRA sites."""

from __future__ import annotations

import torch

from loramux.adapters.tensor_names import EMBEDDING, OUTPUT_LAYER
from loramux.engine.checkpoint import Checkpoint
from loramux.engine.model.config import ModelConfig, parse_config
from loramux.engine.model.decoder import DecoderModel, Layer, Linear
from loramux.engine.model.gguf_weights import GGUFSource
from loramux.engine.model.rope import RopeFrequencies, rope_frequencies
from loramux.engine.model.weights import SafetensorsSource, TensorSource, Weights
from loramux.errors import StartupFailed
from loramux.kernels.ops import Ops
from loramux.lora.types import LoraSite, LoraSlice

LAYER_SITES = 4
"""Linear layers of a block, fused ones counted once."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_dtype(setting: str, device: str, config: ModelConfig) -> torch.dtype:
    """`auto` is bfloat16 on a CPU with instructions for it, the checkpoint's dtype on CUDA, and float32 otherwise."""
    if setting == "auto":
        if device == "cuda":
            return DTYPES.get(config.checkpoint_dtype or "", torch.bfloat16)
        return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
    if setting not in DTYPES:
        raise StartupFailed(f"dtype {setting!r} is not supported; use auto, {', '.join(DTYPES)}")
    return DTYPES[setting]


def load_model(checkpoint: Checkpoint, device: str, dtype: str, ops: Ops) -> DecoderModel:
    """Read the weights onto `device` (`cpu`, `cuda`, or `meta` to check them only) in `dtype` (`auto` or torch's name).

    Raises `StartupFailed` naming an unsupported feature, or the file or tensor that is missing or wrong.
    """
    config = parse_config(checkpoint.config)
    weights = Weights(open_source(checkpoint, config), torch.device(device), choose_dtype(dtype, device, config))
    embedding = weights.take(f"{EMBEDDING}.weight", config.vocab_size, config.hidden_size)
    if config.tie_word_embeddings:
        weights.discard(f"{OUTPUT_LAYER}.weight")
        head = embedding
    else:
        head = weights.take(f"{OUTPUT_LAYER}.weight", config.vocab_size, config.hidden_size)
    head_slice = LoraSlice(OUTPUT_LAYER, 0, config.vocab_size)
    model = DecoderModel(
        config,
        embedding=embedding,
        layers=[_layer(weights, config, index) for index in range(config.num_layers)],
        norm=weights.take("model.norm.weight", config.hidden_size),
        lm_head=Linear(LoraSite(LAYER_SITES * config.num_layers, OUTPUT_LAYER, config.hidden_size, (head_slice,)), head),
        rope=_rope(weights, config, embedding.device),
        ops=ops,
    )
    weights.discard("rotary_emb.inv_freq")
    weights.refuse_leftovers()
    return model


def _cpu_has_bfloat16() -> bool:
    """Every CPU with AMX tiles multiplies bfloat16 in them."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def open_source(checkpoint: Checkpoint, config: ModelConfig) -> TensorSource:
    """The checkpoint's tensors as its files have them."""
    first = checkpoint.weights[0]
    if first.suffix == ".gguf":
        return GGUFSource(first, config.num_heads, config.num_kv_heads)
    return SafetensorsSource(checkpoint.weights)


def _rope(weights: Weights, config: ModelConfig, device: torch.device) -> RopeFrequencies:
    """A GGUF carries llama3's scaling as a divisor per frequency."""
    inverse, attention_factor = rope_frequencies(config.rope, config.head_dim)
    inverse = inverse.to(device)
    if weights.has("rope_freqs.weight"):
        inverse = inverse / weights.take("rope_freqs.weight", config.head_dim // 2).float()
    return RopeFrequencies(inverse, attention_factor)


def _layer(weights: Weights, config: ModelConfig, index: int) -> Layer:
    prefix, site = f"model.layers.{index}", LAYER_SITES * index
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = f"{prefix}.self_attn"
    qkv = {f"{attention}.q_proj": query_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
    gate_up = {f"{prefix}.mlp.gate_proj": config.intermediate_size, f"{prefix}.mlp.up_proj": config.intermediate_size}
    return Layer(
        input_norm=weights.take(f"{prefix}.input_layernorm.weight", config.hidden_size),
        qkv=_linear(weights, site, f"{attention}.qkv_proj", qkv, config.hidden_size, bias=config.qkv_bias),
        q_norm=weights.take(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=weights.take(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        o=_linear(weights, site + 1, f"{attention}.o_proj", {f"{attention}.o_proj": config.hidden_size}, query_size, bias=config.o_bias),
        post_attention_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
        gate_up=_linear(weights, site + 2, f"{prefix}.mlp.gate_up_proj", gate_up, config.hidden_size),
        down=_linear(
            weights, site + 3, f"{prefix}.mlp.down_proj", {f"{prefix}.mlp.down_proj": config.hidden_size}, config.intermediate_size
        ),
    )


def _linear(weights: Weights, number: int, name: str, modules: dict[str, int], in_features: int, *, bias: bool = False) -> Linear:
    """`modules` maps each canonical module to its rows in the fused weight, in order."""
    slices, start = [], 0
    for module, rows in modules.items():
        slices.append(LoraSlice(module, start, start + rows))
        start += rows
    return Linear(
        site=LoraSite(number, name, in_features, tuple(slices)),
        weight=_rows(weights, [f"{module}.weight" for module in modules], list(modules.values()), in_features),
        bias=_rows(weights, [f"{module}.bias" for module in modules], list(modules.values())) if bias else None,
    )


def _rows(weights: Weights, names: list[str], rows: list[int], *rest: int) -> torch.Tensor:
    return weights.take(names[0], rows[0], *rest) if len(names) == 1 else weights.take_fused(names, rows, *rest)
