"""From the bytes of a PEFT adapter to the layout that kernels take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from loramux.adapters.binding import BoundModule, bind
from loramux.adapters.peft_config import read_config, read_keys
from loramux.adapters.peft_tensors import AdapterTensor, pair_tensors, read_tensors
from loramux.adapters.types import ModuleShape
from loramux.errors import AdapterInvalid
from loramux.kernels.ops import SliceWeights
from loramux.lora.types import HostAdapter, LoraSite, LoraSlice, SiteWeights

_ALIGNMENT_BYTES = 64
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_host_adapter(
    digest: str,
    config: bytes,
    tensors: bytes,
    sites: Sequence[LoraSite],
    modules: Mapping[str, ModuleShape],
    dtype: torch.dtype,
) -> HostAdapter:
    """Repack an adapter for the model that has these sites and modules, in the model's dtype.

    All matrices lie in one buffer, each contiguous and aligned to 64 bytes. The scale is multiplied into B in float32, before the
    cast. Raises `AdapterInvalid` if a tensor has no place in the model; the gateway has validated the rest.
    """
    bound = _bind(config, tensors, modules)
    present = [_present(site, bound) for site in sites]
    _check_all_placed(bound, present)
    buffer = _Buffer(sum(_num_elements(site, dtype) for site in present), dtype)
    packed = {site.name: _pack(site, buffer) for site in present if site.parts}
    return HostAdapter(digest, max(module.rank for module in bound.values()), buffer.num_bytes, packed)


class _PresentSite(NamedTuple):
    """A site with those of its slices that the adapter changes."""

    name: str
    in_features: int
    parts: tuple[tuple[LoraSlice, BoundModule], ...]

    @property
    def num_ranks(self) -> int:
        return sum(module.rank for _, module in self.parts)


class _Buffer:
    """Hands out aligned matrices of one allocation."""

    def __init__(self, num_elements: int, dtype: torch.dtype) -> None:
        self._flat = torch.zeros(num_elements + _ALIGNMENT_BYTES // dtype.itemsize, dtype=dtype)
        self._next = -(self._flat.data_ptr() // dtype.itemsize) % (_ALIGNMENT_BYTES // dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        return self._flat.nbytes

    def take(self, num_rows: int, num_columns: int) -> torch.Tensor:
        start, count = self._next, num_rows * num_columns
        self._next += _padded(count, self._flat.dtype)
        return self._flat[start : start + count].view(num_rows, num_columns)


def _bind(config: bytes, tensors: bytes, modules: Mapping[str, ModuleShape]) -> dict[str, BoundModule]:
    pairing = pair_tensors(read_tensors(tensors))
    binding = bind(read_config(read_keys(config)), pairing.pairs, modules)
    errors = (*pairing.errors, *binding.errors)
    if errors or not binding.modules:
        raise AdapterInvalid(errors[0] if errors else "the adapter has no tensors")
    return {module.module: module for module in binding.modules}


def _present(site: LoraSite, bound: Mapping[str, BoundModule]) -> _PresentSite:
    parts = tuple((each, bound[each.module]) for each in site.slices if each.module in bound)
    return _PresentSite(site.name, site.in_features, parts)


def _check_all_placed(bound: Mapping[str, BoundModule], present: Sequence[_PresentSite]) -> None:
    placed = {each.module for site in present for each, _ in site.parts}
    if missing := sorted(bound.keys() - placed):
        raise AdapterInvalid(f"{missing[0]}: the model has no place for an adapter there")


def _pack(site: _PresentSite, buffer: _Buffer) -> SiteWeights:
    a = buffer.take(site.num_ranks, site.in_features)
    slices, rank_start = [], 0
    for each, module in site.parts:
        rank_end = rank_start + module.rank
        a[rank_start:rank_end].copy_(_float32(module.a))
        b = buffer.take(each.out_end - each.out_start, module.rank)
        b.copy_(_float32(module.b).mul(module.scale))
        slices.append(SliceWeights(rank_start, rank_end, each.out_start, each.out_end, b))
        rank_start = rank_end
    return SiteWeights(a, tuple(slices))


def _float32(tensor: AdapterTensor) -> torch.Tensor:
    flat = torch.frombuffer(tensor.data, dtype=_DTYPES[tensor.dtype])
    return flat.to(torch.float32).view(tensor.shape)


def _num_elements(site: _PresentSite, dtype: torch.dtype) -> int:
    outs = sum(_padded((each.out_end - each.out_start) * module.rank, dtype) for each, module in site.parts)
    return _padded(site.num_ranks * site.in_features, dtype) + outs


def _padded(num_elements: int, dtype: torch.dtype) -> int:
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    return -(-num_elements // unit) * unit
