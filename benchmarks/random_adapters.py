"""LoRA adapters of random small weights in PEFT's format, for load: over every linear layer of a Llama-like base."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def linear_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of the seven linear layers of a block, from config.json."""
    hidden, inner, num_heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    q, kv = num_heads * head_dim, config.get("num_key_value_heads", num_heads) * head_dim
    return {
        "self_attn.q_proj": (hidden, q),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def write_random_adapter(directory: Path, config: dict[str, Any], rank: int, seed: int, *, modules: Collection[str] | None = None) -> None:
    """adapter_config.json and adapter_model.safetensors (float16), small enough to leave the base's text sensible.

    Over all seven linear layers, or over `modules`: `self_attn.q_proj` and so on.
    """
    rng = np.random.default_rng(seed)
    shapes = {module: shape for module, shape in linear_shapes(config).items() if modules is None or module in modules}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (in_features, out_features) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = small(rng, rank, in_features)
            tensors[f"{prefix}.lora_B.weight"] = small(rng, out_features, rank)
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [module.rpartition(".")[2] for module in shapes],
        "bias": "none",
    }
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config))
    save_file(tensors, directory / "adapter_model.safetensors")


def small(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return (0.01 * rng.standard_normal((rows, columns), dtype=np.float32)).astype(np.float16)
