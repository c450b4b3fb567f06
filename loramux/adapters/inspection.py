"""What can be said of a PEFT adapter without its base."""

from __future__ import annotations

from typing import Any

import msgspec

from loramux.adapters.identity import digest_of
from loramux.adapters.peft_config import read_config, read_keys
from loramux.adapters.peft_keys import judge_keys
from loramux.adapters.peft_tensors import group_tensors, read_tensors
from loramux.adapters.types import KeyVerdict, TensorInfo
from loramux.errors import AdapterInvalid


class Inspection(msgspec.Struct, frozen=True):
    """`errors` empty means that some base may have it."""

    digest: str
    """`sha256:<hex>` of the adapter's content; empty when it could not be read."""
    keys: tuple[KeyVerdict, ...]
    tensors: tuple[TensorInfo, ...] = ()
    """Under their normal names, in order."""
    errors: tuple[str, ...] = ()


def inspect(config: bytes, tensors: bytes) -> Inspection:
    """Whatever is wrong with the two files is in the result; nothing is raised."""
    keys: dict[str, Any] = {}
    try:
        keys = read_keys(config)
        found = read_tensors(tensors)
        digest = digest_of(read_config(keys), found)
    except AdapterInvalid as error:
        return Inspection("", judge_keys(keys), errors=(error.message,))
    verdicts = judge_keys(keys)
    rejected = (f"{each.key} is rejected: {each.reason}" for each in verdicts if each.verdict == "rejected")
    infos = tuple(tensor.info for tensor in found)
    return Inspection(digest, verdicts, infos, (*rejected, *group_tensors(found).errors))
