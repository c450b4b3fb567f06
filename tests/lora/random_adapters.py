"""Random LoRA adapters as PEFT directories, written without peft."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_random_adapter(
    directory: Path,
    model_dir: Path,
    *,
    rank: int,
    modules: Sequence[str],
    seed: int,
    alpha: float | None = None,
    rslora: bool = False,
    layers: Sequence[int] | None = None,
    in_features_delta: int = 0,
    config_changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter for the checkpoint in `model_dir`, of the Llama family, and return `directory`.

    alpha is 2 * rank unless given. `in_features_delta` widens every A, to make an adapter that does not fit. B is not zero, so the
    adapter's effect is large. The same arguments write the same tensors.
    """
    rng = np.random.default_rng(seed)
    model = json.loads((model_dir / "config.json").read_text())
    tensors = {}
    for layer in range(model["num_hidden_layers"]) if layers is None else layers:
        for module in modules:
            in_features, out_features = _features(model, module)
            in_features += in_features_delta
            name = f"base_model.model.model.layers.{layer}.{_block(module)}.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.normal(0, in_features**-0.5, (rank, in_features)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = rng.normal(0, 0.1, (out_features, rank)).astype(np.float32)
    config = {
        "base_model_name_or_path": model_dir.name,
        "bias": "none",
        "inference_mode": True,
        "layers_to_transform": None if layers is None else list(layers),
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "lora_dropout": 0.05,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": rslora,
        **(config_changes or {}),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def _block(module: str) -> str:
    return "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def _features(model: Mapping[str, Any], module: str) -> tuple[int, int]:
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    head_dim = model.get("head_dim") or hidden // model["num_attention_heads"]
    queries = head_dim * model["num_attention_heads"]
    keys = head_dim * model.get("num_key_value_heads", model["num_attention_heads"])
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }[module]
