"""Values of adapters on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from loramux.kernels.ops import SliceWeights


class LoraSlice(NamedTuple):
    """One canonical module inside a fused linear layer: columns [out_start, out_end) of the layer's output."""

    module: str
    """`model.layers.0.self_attn.q_proj`"""
    out_start: int
    out_end: int


class LoraSite(NamedTuple):
    """A linear layer of the running model that adapters may change; the model declares its sites."""

    name: str
    """`model.layers.0.self_attn.qkv_proj`: unique, the fused layer's own name."""
    in_features: int
    slices: tuple[LoraSlice, ...]


@dataclass(frozen=True)
class SiteWeights:
    """What one adapter adds at one site; see `kernels.ops.LoraTerm` for the equation."""

    a: torch.Tensor
    """[sum of ranks, in_features]"""
    slices: tuple[SliceWeights, ...]


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory, in the layout the kernels take, bound to one base."""

    digest: str
    rank: int
    num_bytes: int
    sites: dict[str, SiteWeights]
    """By site name; a site the adapter leaves alone is absent."""


class LoraSegment(NamedTuple):
    """Rows [start, end) of a step's tokens that one adapter answers for."""

    start: int
    end: int
    adapter: HostAdapter
