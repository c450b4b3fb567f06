"""PEFT directories that fit the fake engine's base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.gateway.served import MODULES


def write_adapter(directory: Path, *, rank: int = 4, seed: int = 0, in_features: int = 16, **config: Any) -> Path:
    rng = np.random.default_rng(seed)
    tensors = {}
    for module in MODULES:
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = rng.standard_normal((rank, in_features)).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = rng.standard_normal((16, rank)).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "tiny/base",
    }
    (directory / "adapter_config.json").write_text(json.dumps({**written, **config}))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
