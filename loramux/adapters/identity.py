"""An adapter's identity is its content: the digest that names it in every cache key.

SHA-256 over the configuration that changes inference, as canonical JSON, and every tensor in order of name: name without peft's
prefix, dtype, shape, bytes. Every field is preceded by its length. The order of tensors in the file, its metadata and the keys
that only training reads do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from loramux.adapters.peft_config import LoraConfig, read_config, read_keys
from loramux.adapters.peft_tensors import AdapterTensor, read_tensors

_DOMAIN = b"loramux adapter 1"


def content_digest(config: bytes, tensors: bytes) -> str:
    """`sha256:<hex>` of the two files of a PEFT adapter. Raises `AdapterInvalid` if one can't be read."""
    return digest_of(read_config(read_keys(config)), read_tensors(tensors))


def digest_of(config: LoraConfig, tensors: Iterable[AdapterTensor]) -> str:
    """The same of what was read already; tensors in order of name."""
    digest = hashlib.sha256()
    for part in _fields(config, tensors):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _fields(config: LoraConfig, tensors: Iterable[AdapterTensor]) -> Iterable[bytes | bytearray]:
    yield _DOMAIN
    yield msgspec.json.encode(_inference_keys(config), order="sorted")
    for tensor in tensors:
        yield msgspec.json.encode(tensor.info, order="sorted")
        yield tensor.data


def _inference_keys(config: LoraConfig) -> dict[str, object]:
    """Patterns keep their order, because the first that matches counts."""
    return {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.use_rslora,
        "rank_pattern": list(config.rank_pattern.items()),
        "alpha_pattern": list(config.alpha_pattern.items()),
    }
