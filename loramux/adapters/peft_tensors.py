"""The tensors of an `adapter_model.safetensors`, paired into modules; no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import safetensors

from loramux.adapters.types import TensorInfo
from loramux.errors import AdapterInvalid

PREFIX = "base_model.model."
"""What peft puts before the name of every module it wraps."""
_SUFFIX_A = ".lora_A.weight"
_SUFFIX_B = ".lora_B.weight"
_DTYPES = frozenset({"F32", "F16", "BF16"})
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor with its bytes, little-endian, row-major."""

    name: str
    """Without peft's prefix, where it has it."""
    dtype: str
    shape: tuple[int, ...]
    data: bytearray
    has_prefix: bool

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.name, self.dtype, self.shape)


class TensorPair(NamedTuple):
    """A [rank, in_features] and B [out_features, rank] of one module."""

    module: str
    a: AdapterTensor
    b: AdapterTensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class Pairing(NamedTuple):
    pairs: tuple[TensorPair, ...]
    """In order of module."""
    errors: tuple[str, ...]
    """One per tensor that is in no pair."""


def refuse_pickles(file_names: Collection[str]) -> None:
    """Raises `AdapterInvalid` naming the first file that would have to be unpickled."""
    for name in sorted(file_names):
        if name.lower().endswith(_PICKLE_SUFFIXES):
            raise AdapterInvalid(f"{name} is a pickle, which can run code when it is read; save the adapter as safetensors")


def read_tensors(tensors: bytes) -> tuple[AdapterTensor, ...]:
    """Every tensor in order of name. Raises `AdapterInvalid` if the file is malformed or names a tensor twice."""
    try:
        entries = safetensors.deserialize(tensors)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        kind = "a pickle, which can run code when it is read" if tensors.startswith(_PICKLE_STARTS) else f"malformed: {error}"
        raise AdapterInvalid(f"adapter_model.safetensors is {kind}") from None
    found = sorted((_tensor(name, entry) for name, entry in entries), key=lambda tensor: tensor.name)
    for one, other in pairwise(found):
        if one.name == other.name:
            raise AdapterInvalid(f"the tensor {one.name} is there twice, with and without the prefix {PREFIX}")
    return tuple(found)


def pair_tensors(tensors: Sequence[AdapterTensor]) -> Pairing:
    """Join each module's A and B."""
    halves_a = {tensor.name.removesuffix(_SUFFIX_A): tensor for tensor in tensors if _is_half(tensor, _SUFFIX_A)}
    halves_b = {tensor.name.removesuffix(_SUFFIX_B): tensor for tensor in tensors if _is_half(tensor, _SUFFIX_B)}
    paired = halves_a.keys() & halves_b.keys()
    errors = [_unpaired(tensor) for tensor in tensors if _module_of(tensor) not in paired]
    return Pairing(tuple(TensorPair(module, halves_a[module], halves_b[module]) for module in sorted(paired)), tuple(errors))


def largest_magnitude(tensor: AdapterTensor) -> float:
    """The largest absolute value; NaN or infinite if any element is."""
    if tensor.dtype == "F32":
        values = np.frombuffer(tensor.data, dtype="<f4")
    elif tensor.dtype == "F16":
        values = np.frombuffer(tensor.data, dtype="<f2").astype(np.float32)
    else:
        values = (np.frombuffer(tensor.data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return float(np.max(np.abs(values), initial=0.0))


def _tensor(name: str, entry: Mapping[str, Any]) -> AdapterTensor:
    return AdapterTensor(
        name=name.removeprefix(PREFIX),
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        data=entry["data"],
        has_prefix=name.startswith(PREFIX),
    )


def _is_half(tensor: AdapterTensor, suffix: str) -> bool:
    return tensor.has_prefix and tensor.name.endswith(suffix) and tensor.dtype in _DTYPES and len(tensor.shape) == 2


def _module_of(tensor: AdapterTensor) -> str | None:
    for suffix in (_SUFFIX_A, _SUFFIX_B):
        if _is_half(tensor, suffix):
            return tensor.name.removesuffix(suffix)
    return None


def _unpaired(tensor: AdapterTensor) -> str:
    if not tensor.has_prefix:
        return f"{tensor.name}: the name does not begin with {PREFIX}"
    if not tensor.name.endswith((_SUFFIX_A, _SUFFIX_B)):
        return f"{tensor.name}: not the A or B of a linear layer"
    if tensor.dtype not in _DTYPES:
        return f"{tensor.name}: dtype {tensor.dtype} is not one of {', '.join(sorted(_DTYPES))}"
    if len(tensor.shape) != 2:
        return f"{tensor.name}: shape {list(tensor.shape)} is not a matrix"
    other = "B" if tensor.name.endswith(_SUFFIX_A) else "A"
    return f"{tensor.name}: its {other} is missing"
