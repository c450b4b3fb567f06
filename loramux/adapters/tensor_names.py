"""One normal name for each tensor of an adapter, whatever wrapped the model when it was saved.

peft writes `base_model.model.` before the name that a module has in the model it wraps. Trainers wrap that again (DDP and DeepSpeed,
FSDP, torch.compile, activation checkpointing, TRL's value heads), wrap less (files without the prefix, or of the model without its
output layer), or take the language model out of a multimodal one. Normal is the name in a causal language model of transformers,
with the suffix that peft writes today: `model.layers.0.self_attn.q_proj.lora_A.weight`, `model.embed_tokens.lora_embedding_A`,
`lm_head.lora_B.weight`. A name under anything that isn't such a wrapper (a vision tower, an encoder, a draft) has no normal form.
"""

from __future__ import annotations

import re
from itertools import dropwhile
from typing import Literal, NamedTuple, cast

PREFIX = "base_model.model."
"""What peft puts before the name of every module it wraps."""
EMBEDDING = "model.embed_tokens"
OUTPUT_LAYER = "lm_head"

Part = Literal[
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "bias",
    "weight",
]
"""The tensors of a module: `bias` and `weight` are the base's own, saved beside the adapter's."""

_SUFFIX = re.compile(
    r"""(?P<module>.+?)\.(?:
        (?P<half>lora_[AB])(?:\.[^.]+)?\.weight
        | (?P<lora_bias>lora_B)(?:\.[^.]+)?\.bias
        | (?P<embedding>lora_embedding_[AB])(?:\.[^.]+)?
        | (?P<magnitude>lora_magnitude_vector)(?:\.[^.]+)?(?:\.weight)?
        | (?:base_layer\.)?(?P<own>bias|weight)
    )""",
    re.VERBOSE,
)
"""The name of an adapter stands after the kind of the tensor where a state was saved that peft had not filtered."""

_TRANSPARENT = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Put in by torch around any module."""
_WRAPPERS = frozenset({"base_model", "model", "module", "pretrained_model", "language_model", "text_model"})
"""What may stand before `layers`, `embed_tokens` and `lm_head`."""


class TensorName(NamedTuple):
    module: str
    """Normal: `model.layers.0.self_attn.q_proj`."""
    part: Part
    file_module: str
    """The module as the file has it, without peft's prefix: the patterns of the configuration may be written for it."""

    @property
    def normal(self) -> str:
        return f"{self.module}.{self.part}"


def parse_name(name: str) -> TensorName | None:
    """None for what isn't a tensor that peft saves with LoRA, or belongs to no part of a language model."""
    match = _SUFFIX.fullmatch(".".join(part for part in name.split(".") if part not in _TRANSPARENT))
    if match is None:
        return None
    module = _normal_module(match["module"])
    if module is None:
        return None
    return TensorName(module, _part(match), match["module"].rpartition(PREFIX)[2])


def _part(match: re.Match[str]) -> Part:
    if match["half"]:
        return cast(Part, f"{match['half']}.weight")
    if match["lora_bias"]:
        return "lora_B.bias"
    return cast(Part, match["embedding"] or match["magnitude"] or match["own"])


def _normal_module(file_module: str) -> str | None:
    inner = list(dropwhile(_WRAPPERS.__contains__, file_module.split(".")))
    if inner == ["embed_tokens"]:
        return EMBEDDING
    if inner == [OUTPUT_LAYER]:
        return OUTPUT_LAYER
    return ".".join(("model", *inner)) if inner[:1] == ["layers"] else None
