"""Values of adapters on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from loramux.adapters.types import ModuleShape
    from loramux.kernels.ops import AdapterWeights


class LoraSlice(NamedTuple):
    """One canonical module inside a fused linear layer: columns [out_start, out_end) of the layer's output."""

    module: str
    """`model.layers.0.self_attn.q_proj`"""
    out_start: int
    out_end: int


class LoraSite(NamedTuple):
    """A linear layer of the running model that adapters may change; the model declares its sites."""

    number: int
    """Place among the model's sites."""
    name: str
    """`model.layers.0.self_attn.qkv_proj`: unique, the fused layer's own name."""
    in_features: int
    slices: tuple[LoraSlice, ...]


class LoraBase(Protocol):
    """What loading an adapter needs to know of the model it is for."""

    @property
    def sites(self) -> tuple[LoraSite, ...]: ...

    @property
    def modules(self) -> Mapping[str, ModuleShape]:
        """Every module an adapter may change, by canonical name."""

    @property
    def dtype(self) -> torch.dtype: ...

    def module_weight(self, module: str) -> torch.Tensor:
        """[out_features, in_features] of a linear module; [vocab, hidden] of the embedding."""

    def module_bias(self, module: str) -> torch.Tensor | None:
        """[out_features]"""


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory, in the layout the kernels take, bound to one base."""

    digest: str
    rank: int
    """The largest."""
    num_bytes: int
    num_pages: int
    """Of the device's memory that its slot takes."""
    weights: AdapterWeights


class LoraSegment(NamedTuple):
    """Rows [start, end) of a step's tokens that one adapter answers for, from its slot."""

    start: int
    end: int
    slot: int
    pages: tuple[int, ...]
    adapter: HostAdapter
