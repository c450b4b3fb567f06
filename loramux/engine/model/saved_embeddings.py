"""Digests of the base's embedding and output matrices, by which a gateway knows the copies that peft saves beside adapters of them."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import msgspec
import torch

from loramux.adapters.tensor_names import EMBEDDING, OUTPUT_LAYER
from loramux.engine.checkpoint import Checkpoint
from loramux.engine.model.config import parse_config
from loramux.engine.model.load import open_source
from loramux.lora.fold import DTYPES

_CHUNK_ELEMENTS = 1 << 22


def saved_weight_digests(tensor: torch.Tensor) -> dict[str, str]:
    """`BaseDescription.saved_weight_digests` of one matrix [rows, columns] of any float dtype and device.

    A few rows are cast at a time, so that no whole copy is made. Hashing takes 8 bytes an element in all.
    """
    digests = {name: hashlib.sha256() for name in DTYPES}
    num_rows = max(1, _CHUNK_ELEMENTS // tensor.shape[1])
    for start in range(0, tensor.shape[0], num_rows):
        for name, dtype in DTYPES.items():
            digests[name].update(tensor[start : start + num_rows].to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)
    return {name: f"sha256:{digest.hexdigest()}" for name, digest in digests.items()}


def base_digests(checkpoint: Checkpoint, cache_dir: Path) -> dict[str, dict[str, str]]:
    """`BaseDescription.saved_weight_digests`, of the matrices as the checkpoint has them, before any cast to the served dtype.

    Kept in `cache_dir` under the checkpoint's digest, since hashing a large vocabulary takes seconds.
    """
    kept = cache_dir / "saved-weights" / f"{checkpoint.digest.removeprefix('sha256:')}.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=dict[str, dict[str, str]])
    config = parse_config(checkpoint.config)
    source = open_source(checkpoint, config)
    embedding = saved_weight_digests(source.read(f"{EMBEDDING}.weight"))
    head = embedding if config.tie_word_embeddings else saved_weight_digests(source.read(f"{OUTPUT_LAYER}.weight"))
    digests = {EMBEDDING: embedding, OUTPUT_LAYER: head}
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{secrets.token_hex(4)}")
    partial.write_bytes(msgspec.json.encode(digests))
    partial.replace(kept)
    return digests
