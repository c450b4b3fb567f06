"""An adapter's identity is its content: the digest that names it in every cache key.

SHA-256 over the configuration that changes inference, as canonical JSON, and every tensor in order of name: normal name
(`tensor_names`), dtype, shape, bytes. Every field is preceded by its length. The order of tensors in the file, its metadata, what
wrapped the model when it was saved and the keys that only training reads do not count. Nor do the base's own embedding and output
matrices, which peft saves beside adapters of them: they are never applied, and a file whose matrices are not the base's is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from loramux.adapters.peft_config import LoraConfig, read_config, read_keys
from loramux.adapters.peft_tensors import AdapterTensor, module_names, read_tensors

_DOMAIN = b"loramux adapter 1"


def content_digest(config: bytes, tensors: bytes) -> str:
    """`sha256:<hex>` of the two files of a PEFT adapter. Raises `AdapterInvalid` if one can't be read."""
    return digest_of(read_config(read_keys(config)), read_tensors(tensors))


def digest_of(config: LoraConfig, tensors: Iterable[AdapterTensor]) -> str:
    """The same of what was read already; tensors in order of name. Raises `AdapterInvalid` for a pattern that can't be used."""
    digest = hashlib.sha256()
    for part in _fields(config, [tensor for tensor in tensors if not tensor.is_saved_weight]):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _fields(config: LoraConfig, tensors: Sequence[AdapterTensor]) -> Iterable[bytes | bytearray]:
    yield _DOMAIN
    yield msgspec.json.encode(_inference_keys(config) | _renamed_scales(config, tensors), order="sorted")
    for tensor in tensors:
        yield msgspec.json.encode(tensor.info, order="sorted")
        yield tensor.data


def _inference_keys(config: LoraConfig) -> dict[str, object]:
    """Patterns keep their order, because the first that matches counts. What DoRA and biases change is in the tensors."""
    return {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.use_rslora,
        "rank_pattern": list(config.rank_pattern.items()),
        "alpha_pattern": list(config.alpha_pattern.items()),
    }


def _renamed_scales(config: LoraConfig, tensors: Sequence[AdapterTensor]) -> dict[str, object]:
    """The scales of modules where the patterns match a name of the file alone, which no other field tells."""
    renamed = {module: names for module, names in module_names(tensors).items() if len(names) > 1}
    scales = {module: config.scale_of(*names) for module, names in renamed.items()}
    found = {module: scale for module, scale in scales.items() if scale != config.scale_of(module)}
    return {"renamed_scales": found} if found else {}
