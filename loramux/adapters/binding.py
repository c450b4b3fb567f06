"""An adapter's tensors bound to the modules of a base: which matrices change which layer, at what scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from loramux.adapters.peft_config import LoraConfig
from loramux.adapters.peft_tensors import AdapterTensor, ModuleTensors
from loramux.adapters.tensor_names import Part
from loramux.adapters.types import ModuleKind, ModuleShape


class BoundModule(NamedTuple):
    """What an adapter changes at one layer.

    A linear layer gives `y = g * (W x + scale * (B (A x) + lora_bias)) + c`. Here g is 1 without a magnitude, otherwise
    `magnitude / ||W + scale * B A||`, one value an output, of the norm over the inputs; c is `bias`, or the base's own where that is
    None. An embedding gives for token t the column t of `g * (W^T + scale * B A)`, where g is one value a hidden unit, of the norm
    over the vocabulary.
    """

    module: str
    kind: ModuleKind
    a: AdapterTensor | None
    """[rank, in_features]. None, with b, where only the bias is replaced."""
    b: AdapterTensor | None
    """[out_features, rank]"""
    rank: int
    """0 where only the bias is replaced."""
    scale: float
    magnitude: AdapterTensor | None = None
    """out_features values, whatever the shape: DoRA's."""
    lora_bias: AdapterTensor | None = None
    """[out_features], scaled with B."""
    bias: AdapterTensor | None = None
    """[out_features], in place of the base's."""

    @property
    def tensors(self) -> tuple[AdapterTensor, ...]:
        """Those that it has."""
        every = (self.a, self.b, self.magnitude, self.lora_bias, self.bias)
        return tuple(tensor for tensor in every if tensor is not None)


class Binding(NamedTuple):
    modules: tuple[BoundModule, ...]
    """Those that fit, in order of name."""
    errors: tuple[str, ...]

    @property
    def num_tensors(self) -> int:
        return sum(len(module.tensors) for module in self.modules)


class _Halves(NamedTuple):
    """The parts that hold A and B, by kind of module."""

    a: Part
    b: Part


_HALVES: Mapping[ModuleKind, _Halves] = {
    "linear": _Halves("lora_A.weight", "lora_B.weight"),
    "embedding": _Halves("lora_embedding_A", "lora_embedding_B"),
}


def bind(config: LoraConfig, found: Iterable[ModuleTensors], modules: Mapping[str, ModuleShape]) -> Binding:
    """Match what the file holds with the base's module of its name. Raises `AdapterInvalid` for a pattern that can't be used."""
    bound, errors = [], []
    for tensors in found:
        shape = modules.get(tensors.module)
        if shape is None:
            errors.append(f"{tensors.module}: the base has no such module")
        elif problem := next(_problems(config, tensors, shape), None):
            errors.append(f"{tensors.module}: {problem}")
        else:
            bound.append(_bound(config, tensors, shape.kind))
    return Binding(tuple(bound), tuple(errors))


def _bound(config: LoraConfig, tensors: ModuleTensors, kind: ModuleKind) -> BoundModule:
    a = tensors.parts.get(_HALVES[kind].a)
    return BoundModule(
        module=tensors.module,
        kind=kind,
        a=a,
        b=tensors.parts.get(_HALVES[kind].b),
        rank=a.shape[0] if a else 0,
        scale=config.scale_of(*tensors.names),
        magnitude=tensors.parts.get("lora_magnitude_vector"),
        lora_bias=tensors.parts.get("lora_B.bias"),
        bias=tensors.parts.get("bias"),
    )


def _problems(config: LoraConfig, tensors: ModuleTensors, shape: ModuleShape) -> Iterator[str]:
    """What is wrong at a module; later ones hold only where there are none before."""
    halves = _HALVES[shape.kind]
    if tensors.parts.keys() - {"bias"}:
        yield from _wrong_parts(tensors.parts, halves, shape.kind)
        if not config.targets(*tensors.names):
            yield "it has tensors, but the configuration does not target it"
        yield from _wrong_matrices(config.rank_of(*tensors.names), tensors.parts[halves.a], tensors.parts[halves.b], shape)
        yield from _wrong_magnitude(config, tensors.parts.get("lora_magnitude_vector"), shape)
        yield from _wrong_lora_bias(config, tensors.parts.get("lora_B.bias"), shape)
    if bias := tensors.parts.get("bias"):
        yield from _wrong_bias(config, bias, shape, is_alone=halves.a not in tensors.parts)


def _wrong_parts(parts: Mapping[Part, AdapterTensor], halves: _Halves, kind: ModuleKind) -> Iterator[str]:
    for other in _HALVES.values():
        if other != halves and (wrong := parts.keys() & other):
            yield f"it is a layer of kind {kind}, which has no {min(wrong)}"
    if halves.a not in parts:
        yield "its A is missing"
    if halves.b not in parts:
        yield "its B is missing"


def _wrong_matrices(rank: int, a: AdapterTensor, b: AdapterTensor, shape: ModuleShape) -> Iterator[str]:
    for half, tensor in (("A", a), ("B", b)):
        if len(tensor.shape) != 2:
            yield f"{half} has the shape {list(tensor.shape)}, not a matrix's"
    if a.shape[0] != rank or b.shape[1] != rank:
        yield f"the configuration says rank {rank}, but A has {a.shape[0]} and B has {b.shape[1]}"
    if a.shape[1] != shape.in_features or b.shape[0] != shape.out_features:
        given = f"{a.shape[1]} -> {b.shape[0]}"
        yield f"the adapter maps {given} features, the base's layer {shape.in_features} -> {shape.out_features}"


def _wrong_magnitude(config: LoraConfig, magnitude: AdapterTensor | None, shape: ModuleShape) -> Iterator[str]:
    if magnitude is None and config.use_dora:
        yield "use_dora is set, but its lora_magnitude_vector is missing"
    elif magnitude is not None and not config.use_dora:
        yield "it has a lora_magnitude_vector, but use_dora is not set"
    elif magnitude is not None and magnitude.num_elements != shape.out_features:
        yield f"its lora_magnitude_vector has {magnitude.num_elements} values, the layer {shape.out_features} outputs"


def _wrong_lora_bias(config: LoraConfig, lora_bias: AdapterTensor | None, shape: ModuleShape) -> Iterator[str]:
    if config.lora_bias and shape.kind == "embedding":
        yield "lora_bias is set, which an embedding can't have"
    if lora_bias is None and config.lora_bias:
        yield "lora_bias is set, but its lora_B.bias is missing"
    elif lora_bias is not None and not config.lora_bias:
        yield "it has a lora_B.bias, but lora_bias is not set"
    elif lora_bias is not None and lora_bias.shape != (shape.out_features,):
        yield f"its lora_B.bias has the shape {list(lora_bias.shape)}, not {[shape.out_features]}"


def _wrong_bias(config: LoraConfig, bias: AdapterTensor, shape: ModuleShape, *, is_alone: bool) -> Iterator[str]:
    if config.bias == "none":
        yield "it has a bias, but the configuration's bias is none"
    if is_alone and config.bias != "all":
        yield f"it has a bias and no adapter, but the configuration's bias is {config.bias}"
    if not shape.has_bias:
        yield "it has a bias, the base's layer has none"
    if bias.shape != (shape.out_features,):
        yield f"its bias has the shape {list(bias.shape)}, not {[shape.out_features]}"
