"""The settings of one engine process; made by whoever starts it, passed as JSON on its standard input."""

from __future__ import annotations

from typing import Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True):
    """Fields are named like the flags of `loramux serve`."""

    model: str
    """A directory or a GGUF file."""
    endpoint: str
    """The ZeroMQ address to bind."""
    data_dir: str
    """Where the checkpoint cache and the engine's own copies of adapters are kept."""
    name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    quantization: Literal["int8"] | None = None
    max_model_len: int | None = None
    """None is what the checkpoint allows, or what the KV capacity holds if that is less."""
    kv_cache_gib: float | None = None
    """None is an eighth of the machine's memory, at most 4 GiB."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    """The token budget of a step."""
    max_loras: int = 8
    max_lora_rank: int = 64
    lora_host_gib: float = 2.0
    lora_memory_gib: float | None = None
    """Of a device with memory of its own, for adapters; None is room for the largest in every slot."""
    num_threads: int | None = None
