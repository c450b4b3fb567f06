"""A checkpoint into a running decoder: device, dtype, weights, LoRA sites."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loramux.adapters.tensor_names import EMBEDDING, OUTPUT_LAYER
from loramux.engine.checkpoint import Checkpoint
from loramux.engine.model.config import ModelConfig, parse_config
from loramux.engine.model.decoder import DecoderModel
from loramux.engine.model.gguf_weights import GGUFSource
from loramux.engine.model.rope import RopeFrequencies, rope_frequencies
from loramux.engine.model.weights import SafetensorsSource, TensorSource, Weights
from loramux.errors import StartupFailed
from loramux.kernels.ops import DecoderShape, DecoderWeights, LayerWeights, LinearWeights, Ops, Quantization
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


def load_model(checkpoint: Checkpoint, device: str, dtype: str, ops: Ops, quantization: Quantization | None = None) -> DecoderModel:
    """Read the weights onto `device` (`cpu`, `cuda`, or `meta` to check them only) in `dtype` (`auto` or torch's name).

    With `quantization` the device's decoder keeps the matrices so.

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
    norm = weights.take("model.norm.weight", config.hidden_size)
    sites = linear_sites(config)
    layers = (_layer(weights, config, sites[LAYER_SITES * index :], index) for index in range(config.num_layers))
    decoder = ops.decoder(_shape(config, weights.dtype), DecoderWeights(embedding, layers, norm, LinearWeights(head)), quantization)
    rope = _rope(weights, config)
    weights.discard("rotary_emb.inv_freq")
    weights.refuse_leftovers()
    return DecoderModel(config, dtype=weights.dtype, sites=sites, rope=rope, decoder=decoder)


def linear_sites(config: ModelConfig) -> tuple[LoraSite, ...]:
    """The decoder's linear layers in its order, with the checkpoint's modules that each holds."""
    sites = [site for index in range(config.num_layers) for site in _layer_sites(config, index)]
    return (*sites, _site(len(sites), OUTPUT_LAYER, config.hidden_size, {OUTPUT_LAYER: config.vocab_size}))


def _cpu_has_bfloat16() -> bool:
    """Every CPU with AMX tiles multiplies bfloat16 in them."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def open_source(checkpoint: Checkpoint, config: ModelConfig) -> TensorSource:
    """The checkpoint's tensors as its files have them."""
    first = checkpoint.weights[0]
    if first.suffix == ".gguf":
        return GGUFSource(first, config.num_heads, config.num_kv_heads)
    return SafetensorsSource(checkpoint.weights)


def _rope(weights: Weights, config: ModelConfig) -> RopeFrequencies:
    """On the CPU, where a step's numbers are made. A GGUF carries llama3's scaling as a divisor per frequency."""
    inverse, attention_factor = rope_frequencies(config.rope, config.head_dim)
    if weights.has("rope_freqs.weight"):
        inverse = inverse / weights.take("rope_freqs.weight", config.head_dim // 2, device="cpu").float()
    return RopeFrequencies(inverse, attention_factor)


def _shape(config: ModelConfig, dtype: torch.dtype) -> DecoderShape:
    return DecoderShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        sliding_window=config.sliding_window,
        rms_norm_eps=config.rms_norm_eps,
        dtype=dtype,
    )


def _layer_sites(config: ModelConfig, index: int) -> tuple[LoraSite, ...]:
    prefix, first = f"model.layers.{index}", LAYER_SITES * index
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {f"{attention}.q_proj": query_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
    gate_up = {f"{mlp}.gate_proj": config.intermediate_size, f"{mlp}.up_proj": config.intermediate_size}
    return (
        _site(first, f"{attention}.qkv_proj", config.hidden_size, qkv),
        _site(first + 1, f"{attention}.o_proj", query_size, {f"{attention}.o_proj": config.hidden_size}),
        _site(first + 2, f"{mlp}.gate_up_proj", config.hidden_size, gate_up),
        _site(first + 3, f"{mlp}.down_proj", config.intermediate_size, {f"{mlp}.down_proj": config.hidden_size}),
    )


def _site(number: int, name: str, in_features: int, modules: dict[str, int]) -> LoraSite:
    """`modules` maps each canonical module to its rows in the fused weight, in order."""
    slices, start = [], 0
    for module, rows in modules.items():
        slices.append(LoraSlice(module, start, start + rows))
        start += rows
    return LoraSite(number, name, in_features, tuple(slices))


def _layer(weights: Weights, config: ModelConfig, sites: Sequence[LoraSite], index: int) -> LayerWeights:
    """`sites` begin with the layer's."""
    prefix = f"model.layers.{index}"
    has_bias = (config.qkv_bias, config.o_bias, False, False)
    qkv, o, gate_up, down = (_linear(weights, site, bias) for site, bias in zip(sites, has_bias, strict=False))
    return LayerWeights(
        input_norm=weights.take(f"{prefix}.input_layernorm.weight", config.hidden_size),
        qkv=qkv,
        q_norm=weights.take(f"{prefix}.self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=weights.take(f"{prefix}.self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        o=o,
        post_attention_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
        gate_up=gate_up,
        down=down,
    )


def _linear(weights: Weights, site: LoraSite, has_bias: bool) -> LinearWeights:
    names = [part.module for part in site.slices]
    rows = [part.out_end - part.out_start for part in site.slices]
    return LinearWeights(
        _rows(weights, [f"{name}.weight" for name in names], rows, site.in_features),
        _rows(weights, [f"{name}.bias" for name in names], rows) if has_bias else None,
    )


def _rows(weights: Weights, names: list[str], rows: list[int], *rest: int) -> torch.Tensor:
    return weights.take(names[0], rows[0], *rest) if len(names) == 1 else weights.take_fused(names, rows, *rest)
