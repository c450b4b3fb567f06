"""The tensors of an `adapter_model.safetensors`, by module; no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
import safetensors

from loramux.adapters.tensor_names import EMBEDDING, OUTPUT_LAYER, PREFIX, Part, TensorName, parse_name
from loramux.adapters.types import TensorInfo
from loramux.errors import AdapterInvalid

_DTYPES = frozenset({"F32", "F16", "BF16"})
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor with its bytes, little-endian, row-major."""

    name: str
    """Normal (`tensor_names`); the file's own, without peft's prefix, where it has no normal form."""
    parsed: TensorName | None
    dtype: str
    shape: tuple[int, ...]
    data: bytearray

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.name, self.dtype, self.shape)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def is_saved_weight(self) -> bool:
        """Whether it is the base's own embedding or output matrix, which peft saves beside adapters of them."""
        return self.parsed is not None and self.parsed.part == "weight" and self.parsed.module in (EMBEDDING, OUTPUT_LAYER)


class ModuleTensors(NamedTuple):
    """What the file holds for one module."""

    module: str
    names: tuple[str, ...]
    """The normal name of the module, then those that the file has for it if they differ."""
    parts: Mapping[Part, AdapterTensor]


class Grouping(NamedTuple):
    modules: tuple[ModuleTensors, ...]
    """In order of name."""
    saved_weights: tuple[AdapterTensor, ...]
    errors: tuple[str, ...]
    """One per tensor that is in neither."""


def refuse_pickles(file_names: Collection[str]) -> None:
    """Raises `AdapterInvalid` naming the first file that would have to be unpickled."""
    for name in sorted(file_names):
        if name.lower().endswith(_PICKLE_SUFFIXES):
            raise AdapterInvalid(f"{name} is a pickle, which can run code when it is read; save the adapter as safetensors")


def read_tensors(tensors: bytes) -> tuple[AdapterTensor, ...]:
    """Every tensor in order of name, equal ones of the same name once.

    Raises `AdapterInvalid` if the file is malformed, or gives one name to two tensors that differ.
    """
    try:
        entries = safetensors.deserialize(tensors)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        kind = "a pickle, which can run code when it is read" if tensors.startswith(_PICKLE_STARTS) else f"malformed: {error}"
        raise AdapterInvalid(f"adapter_model.safetensors is {kind}") from None
    found = sorted((_tensor(name, entry) for name, entry in entries), key=_order)
    return tuple(_the_one(list(equals)) for _, equals in groupby(found, key=lambda tensor: tensor.name))


def group_tensors(tensors: Sequence[AdapterTensor]) -> Grouping:
    """Join what belongs to each module."""
    errors: list[str] = []
    saved_weights: list[AdapterTensor] = []
    parts: dict[str, dict[Part, AdapterTensor]] = {}
    for tensor in tensors:
        if problem := _problem(tensor):
            errors.append(problem)
        elif tensor.is_saved_weight:
            saved_weights.append(tensor)
        elif tensor.parsed is not None:
            parts.setdefault(tensor.parsed.module, {})[tensor.parsed.part] = tensor
    names = module_names(tensors)
    modules = tuple(ModuleTensors(module, names[module], parts[module]) for module in sorted(parts))
    return Grouping(modules, tuple(saved_weights), tuple(errors))


def module_names(tensors: Iterable[AdapterTensor]) -> dict[str, tuple[str, ...]]:
    """By normal name of the module: that name, then those that the file has for it if they differ, in order."""
    names: dict[str, set[str]] = {}
    for tensor in tensors:
        if tensor.parsed is not None:
            names.setdefault(tensor.parsed.module, set()).add(tensor.parsed.file_module)
    return {module: (module, *sorted(file_names - {module})) for module, file_names in names.items()}


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
    parsed = parse_name(name)
    return AdapterTensor(
        name=parsed.normal if parsed else name.removeprefix(PREFIX),
        parsed=parsed,
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        data=entry["data"],
    )


def _order(tensor: AdapterTensor) -> tuple[str, str]:
    return tensor.name, tensor.parsed.file_module if tensor.parsed else ""


def _the_one(equals: Sequence[AdapterTensor]) -> AdapterTensor:
    first, *others = equals
    if any((first.dtype, first.shape, first.data) != (other.dtype, other.shape, other.data) for other in others):
        raise AdapterInvalid(f"the tensor {first.name} is there twice, under different names and with different values")
    return first


def _problem(tensor: AdapterTensor) -> str | None:
    if tensor.parsed is None:
        return f"{tensor.name}: not a tensor of LoRA on a layer of a language model"
    if tensor.parsed.part == "weight" and not tensor.is_saved_weight:
        return f"{tensor.name}: replaced weights are not supported"
    if tensor.dtype not in _DTYPES:
        return f"{tensor.name}: dtype {tensor.dtype} is not one of {', '.join(sorted(_DTYPES))}"
    return None
