"""Values about adapters and the base they belong to. They cross processes, so they are frozen and hold no tensors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ModuleKind = Literal["linear", "embedding"]
Tier = Literal["host", "device"]
"""Where an engine can be asked to have an adapter: host memory, or a slot of the device."""


class ModuleShape(msgspec.Struct, frozen=True):
    """A layer of the base that an adapter may change."""

    in_features: int
    """Of an embedding, its rows."""
    out_features: int
    """Of an embedding, the width of a row."""
    kind: ModuleKind = "linear"
    has_bias: bool = False


class BaseDescription(msgspec.Struct, frozen=True):
    """What a gateway knows of an engine's base model: enough to validate an adapter and a request without torch.

    Filled by the engine, sent on connecting.
    """

    digest: str
    """`sha256:<hex>` over the checkpoint's configuration and weights."""
    tokenizer_digest: str
    """`sha256:<hex>` of tokenizer.json."""
    name: str
    """The checkpoint's own name; compared with an adapter's `base_model_name_or_path` only to warn."""
    model_type: str
    vocab_size: int
    """Rows of the embedding, padding included: the width of the logits."""
    max_model_len: int
    """Tokens, prompt and completion together."""
    dtype: str
    eos_token_ids: tuple[int, ...]
    """From config, generation config and tokenizer together."""
    max_lora_rank: int
    modules: dict[str, ModuleShape]
    """By canonical name: `model.layers.0.self_attn.q_proj`, `model.embed_tokens`, `lm_head`."""
    saved_weight_digests: dict[str, dict[str, str]] = {}
    """Of `model.embed_tokens` and `lm_head`, because peft saves their matrices beside adapters of them: module name to safetensors
    dtype (F32, F16, BF16) to `sha256:<hex>` of the matrix in that dtype, row-major, little-endian. Where the base lacks a module it
    lacks its digests."""
    added_tokens: dict[str, int] = {}
    """The tokenizer's added tokens and their ids; an adapter may name them in its added_tokens.json, and no others."""


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor in an adapter's safetensors file."""

    name: str
    dtype: str
    """safetensors' spelling: F32, F16, BF16."""
    shape: tuple[int, ...]


class KeyVerdict(msgspec.Struct, frozen=True):
    """What the server does with one key of `adapter_config.json`."""

    key: str
    verdict: Literal["applied", "ignored", "rejected"]
    reason: str = ""


class RegistrationReport(msgspec.Struct, frozen=True):
    """The outcome of validating a PEFT adapter against a base. `errors` empty means it may be served."""

    digest: str
    """`sha256:<hex>` of the adapter's content; empty when it could not be read."""
    tensors_matched: int
    tensors_total: int
    modules: tuple[str, ...]
    """Canonical names of the modules changed."""
    rank: int
    """The largest rank."""
    ranks: dict[str, int]
    """Where a module's rank differs from `rank`."""
    scale: float
    """alpha / r, or alpha / sqrt(r) with rsLoRA, of the configuration's defaults."""
    num_bytes: int
    """Of the tensors that are applied."""
    keys: tuple[KeyVerdict, ...]
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


class AdapterVersion(msgspec.Struct, frozen=True):
    """One immutable version of a registered adapter."""

    name: str
    version: int
    digest: str
    base_digest: str
    state: Literal["ready", "draining", "deleted"]
    created_at: float
    """Unix seconds."""
    report: RegistrationReport
    source: str = ""
    """Where the bytes came from, for people: `file:...` or `upload`."""
    metadata: dict[str, Any] = {}

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"
