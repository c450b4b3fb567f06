"""An adapter's tensors bound to the modules of a base: which matrices change which layer, at what scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from loramux.adapters.peft_config import LoraConfig
from loramux.adapters.peft_tensors import AdapterTensor, TensorPair
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


class Binding(NamedTuple):
    modules: tuple[BoundModule, ...]
    """Those that fit, in order of name."""
    errors: tuple[str, ...]


def bind(config: LoraConfig, pairs: Iterable[TensorPair], modules: Mapping[str, ModuleShape]) -> Binding:
    """Match every pair with the base's module of its name. Raises `AdapterInvalid` for a pattern that can't be used."""
    bound, errors = [], []
    for pair in pairs:
        if problem := _mismatch(config, pair, modules.get(pair.module)):
            errors.append(problem)
        else:
            bound.append(BoundModule(pair.module, "linear", pair.a, pair.b, pair.rank, config.scale_of(pair.module)))
    return Binding(tuple(bound), tuple(errors))


def _mismatch(config: LoraConfig, pair: TensorPair, shape: ModuleShape | None) -> str | None:
    name = pair.module
    if shape is None:
        return f"{name}: the base has no such module"
    if not config.targets(name):
        return f"{name}: it has tensors, but the configuration does not target it"
    rank = config.rank_of(name)
    if pair.a.shape[0] != rank or pair.b.shape[1] != rank:
        return f"{name}: the configuration says rank {rank}, but A has {pair.a.shape[0]} and B has {pair.b.shape[1]}"
    if pair.a.shape[1] != shape.in_features or pair.b.shape[0] != shape.out_features:
        given = f"{pair.a.shape[1]} -> {pair.b.shape[0]}"
        return f"{name}: the adapter maps {given} features, the base's layer {shape.in_features} -> {shape.out_features}"
    return None
