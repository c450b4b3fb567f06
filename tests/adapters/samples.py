"""Small adapters and the base they fit, as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save

from loramux.adapters.types import BaseDescription, ModuleShape, RegistrationReport

PREFIX = "base_model.model."

MODULES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(3)
    for name, shape in {
        "self_attn.q_proj": ModuleShape(16, 24),
        "self_attn.v_proj": ModuleShape(16, 8),
        "mlp.down_proj": ModuleShape(32, 16),
    }.items()
}

BASE = BaseDescription(
    digest="sha256:" + "b" * 64,
    tokenizer_digest="sha256:" + "c" * 64,
    name="org/tiny",
    model_type="llama",
    vocab_size=384,
    max_model_len=128,
    dtype="float32",
    eos_token_ids=(2,),
    max_lora_rank=64,
    modules=MODULES,
)

CONFIG = {
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "lora_alpha": 16,
    "peft_type": "LORA",
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}

REPORT = RegistrationReport(
    digest="", tensors_matched=2, tensors_total=2, modules=("m",), rank=4, ranks={}, scale=2.0, num_bytes=10, keys=()
)


def config_bytes(**changes: Any) -> bytes:
    return json.dumps({**CONFIG, **changes}).encode()


def matrices(ranks: Mapping[str, int] | None = None, seed: int = 0, dtype: type[np.floating[Any]] = np.float32) -> dict[str, np.ndarray]:
    """A and B by the names that peft gives them; rank 4 on every q_proj and v_proj unless told."""
    if ranks is None:
        ranks = {name: 4 for name in MODULES if name.endswith(("q_proj", "v_proj"))}
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, rank in ranks.items():
        shape = MODULES[name]
        tensors[f"{PREFIX}{name}.lora_A.weight"] = rng.normal(size=(rank, shape.in_features)).astype(dtype)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = rng.normal(size=(shape.out_features, rank)).astype(dtype)
    return tensors


def tensor_bytes(ranks: Mapping[str, int] | None = None, seed: int = 0) -> bytes:
    return save(matrices(ranks, seed))
