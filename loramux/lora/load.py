"""From the bytes of a PEFT adapter to the layout that kernels take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from loramux.adapters.binding import BoundModule, bind
from loramux.adapters.peft_config import read_config, read_keys
from loramux.adapters.peft_tensors import group_tensors, read_tensors
from loramux.errors import AdapterInvalid
from loramux.kernels.ops import AdapterWeights, EmbeddingWeights, LoraSlots, SiteWeights, SliceWeights
from loramux.lora.buffer import Area, HostBuffer
from loramux.lora.fold import fold
from loramux.lora.types import HostAdapter, LoraBase, LoraSite, LoraSlice


def load_host_adapter(digest: str, config: bytes, tensors: bytes, base: LoraBase, slots: LoraSlots) -> HostAdapter:
    """Repack an adapter for a model, in the model's dtype.

    All matrices and vectors lie in one buffer. Scale and DoRA's gain are multiplied into B in float32, before the cast. Raises
    `AdapterInvalid` if a tensor has no place in the model; the gateway has validated the rest.
    """
    bound = _bind(config, tensors, base)
    present = [_present(site, bound) for site in base.sites]
    embedding = next((module for module in bound.values() if module.kind == "embedding"), None)
    _check_all_placed(bound, present)
    rank = max(module.rank for module in bound.values())
    buffer = HostBuffer(sum(area.num_bytes for area in _areas(present, embedding, base)))
    weights = AdapterWeights(
        tuple(_site_weights(site, base, buffer) if site.parts else None for site in present),
        _embedding_weights(embedding, base, buffer) if embedding else None,
    )
    return HostAdapter(digest, rank, buffer.num_bytes, slots.num_pages_of(weights), slots.prepare(weights))


class _PresentSite(NamedTuple):
    """A site with those of its slices that the adapter changes."""

    in_features: int
    parts: tuple[tuple[LoraSlice, BoundModule], ...]

    @property
    def num_ranks(self) -> int:
        return sum(module.rank for _, module in self.parts)


def _bind(config: bytes, tensors: bytes, base: LoraBase) -> dict[str, BoundModule]:
    grouping = group_tensors(read_tensors(tensors))
    binding = bind(read_config(read_keys(config)), grouping.modules, base.modules)
    errors = (*grouping.errors, *binding.errors)
    if errors or not binding.modules:
        raise AdapterInvalid(errors[0] if errors else "the adapter has no tensors")
    return {module.module: module for module in binding.modules}


def _present(site: LoraSite, bound: Mapping[str, BoundModule]) -> _PresentSite:
    return _PresentSite(site.in_features, tuple((each, bound[each.module]) for each in site.slices if each.module in bound))


def _check_all_placed(bound: Mapping[str, BoundModule], present: Sequence[_PresentSite]) -> None:
    placed = {each.module for site in present for each, _ in site.parts}
    missing = sorted(name for name, module in bound.items() if module.kind == "linear" and name not in placed)
    if missing:
        raise AdapterInvalid(f"{missing[0]}: the model has no place for an adapter there")


def _areas(present: Sequence[_PresentSite], embedding: BoundModule | None, base: LoraBase) -> list[Area]:
    """Of everything that will be taken from the buffer."""
    areas = []
    for site in present:
        areas.append(Area((site.num_ranks, site.in_features), base.dtype))
        for part, module in site.parts:
            areas += _slice_areas(module, part.out_end - part.out_start, base)
    if embedding:
        shape = base.modules[embedding.module]
        areas.append(Area((shape.in_features, embedding.rank), base.dtype))
        areas += _slice_areas(embedding, shape.out_features, base)
    return areas


def _slice_areas(module: BoundModule, num_outputs: int, base: LoraBase) -> list[Area]:
    """Of B, and as many vectors as there may be."""
    vector = Area((num_outputs,), torch.float32)
    num_vectors = 2 if module.magnitude or module.lora_bias or module.bias else 0
    return [Area((module.rank, num_outputs), base.dtype), *[vector] * num_vectors]


def _site_weights(site: _PresentSite, base: LoraBase, buffer: HostBuffer) -> SiteWeights:
    a = buffer.take(Area((site.num_ranks, site.in_features), base.dtype))
    slices, rank_start = [], 0
    for part, module in site.parts:
        rank_end = rank_start + module.rank
        folded = fold(module, base)
        a[rank_start:rank_end] = folded.a
        b = buffer.take(Area((module.rank, part.out_end - part.out_start), base.dtype)).copy_(folded.b.t())
        gain, shift = _taken(folded.gain, buffer), _taken(folded.shift, buffer)
        slices.append(SliceWeights(rank_start, rank_end, part.out_start, part.out_end, b, gain, shift))
        rank_start = rank_end
    return SiteWeights(a, tuple(slices))


def _embedding_weights(module: BoundModule, base: LoraBase, buffer: HostBuffer) -> EmbeddingWeights:
    folded = fold(module, base)
    shape = base.modules[module.module]
    a = buffer.take(Area((shape.in_features, module.rank), base.dtype)).copy_(folded.a.t())
    b = buffer.take(Area((module.rank, shape.out_features), base.dtype)).copy_(folded.b.t())
    return EmbeddingWeights(a, b, _taken(folded.gain, buffer))


def _taken(vector: torch.Tensor | None, buffer: HostBuffer) -> torch.Tensor | None:
    return None if vector is None else buffer.take(Area(tuple(vector.shape), torch.float32)).copy_(vector)
