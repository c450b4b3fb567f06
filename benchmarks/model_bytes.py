"""What a model weighs in memory, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loramux.engine.checkpoint import open_checkpoint
from loramux.engine.model.config import parse_config
from loramux.engine.model.load import choose_dtype, linear_sites


class ModelBytes(NamedTuple):
    weights: int
    """All matrices, those that are tied once."""
    read_per_step: int
    """The linear layers', which every decode step reads whole."""
    kv_per_token: int


def model_bytes(model: Path, directory: Path, flags: Sequence[str] = ()) -> ModelBytes:
    """As a CPU engine started with these flags keeps it."""
    config = parse_config(open_checkpoint(str(model), directory / "checkpoints").config)
    itemsize = choose_dtype(flag_value(flags, "--dtype", "auto"), "cpu", config).itemsize
    matrices = sum(site.in_features * site.slices[-1].out_end for site in linear_sites(config))
    linear = matrices * (1 if flag_value(flags, "--quantization", "") == "int8" else itemsize)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * itemsize
    return ModelBytes(linear + embedding, linear, 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize)


def flag_value(flags: Sequence[str], name: str, default: str) -> str:
    """Of `--name value` or `--name=value`."""
    for at, flag in enumerate(flags):
        if flag == name and at + 1 < len(flags):
            return flags[at + 1]
        if flag.startswith(f"{name}="):
            return flag.partition("=")[2]
    return default
