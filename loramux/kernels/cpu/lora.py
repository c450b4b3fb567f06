"""y' = gain * y + (x A^T)[:, ranks] B + shift in C++: `reference/lora.py`, one native call for all adapters of a batch at a layer.

A plan and everything it refers to is addresses and sizes, taken from tensors once, when an adapter is prepared: a call costs a few
microseconds, and a step makes over a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from loramux.kernels.cpu import _native
from loramux.kernels.cpu.addresses import address, contiguous_address
from loramux.kernels.cpu.dtypes import DTYPES
from loramux.kernels.ops import AdapterWeights, EmbeddingWeights, LoraShape, SiteShape, SiteWeights, SliceWeights, SlotRows


@dataclass(frozen=True)
class CpuAdapterWeights(AdapterWeights):
    """Keeps the tensors that its native twin points into."""

    native: _native.LoraAdapter = field(kw_only=True)


class CpuLoraPlan:
    """Implements `kernels.ops.LoraPlan`. One thread at a time uses a plan, which works on as many threads as torch has.

    A row's result is the same bit for bit whatever other adapters' rows are in the batch and however many threads there are. The length
    of its own adapter's segment may round it otherwise: `lora_panels.h`.
    """

    def __init__(self, rows: Sequence[SlotRows], dtype: torch.dtype, isa: _native.Isa) -> None:
        self._weights = [_prepared(each.weights) for each in rows]
        self._dtype = dtype
        segments = [(each.start, each.end, weights.native) for each, weights in zip(rows, self._weights, strict=True)]
        self.native = _native.LoraPlan(segments, DTYPES[dtype], isa)

    def apply(self, site: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """Change y [T, out] in place; x [T, in_features]. Both contiguous, of the plan's dtype, on the CPU.

        Raises ValueError, before anything is written, for any other dtype, shape or layout.
        """
        y_address, x_address = (contiguous_address(matrix, self._dtype) for matrix in (y, x))
        (y_rows, y_columns), (x_rows, x_columns) = y.shape, x.shape
        self.native.apply(site, y_address, y_rows, y_columns, x_address, x_rows, x_columns, torch.get_num_threads())

    def embed(self, y: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Change embeddings y [T, hidden] in place; token_ids int64 [T]. Both contiguous, on the CPU.

        Raises ValueError, before anything is written, for any other dtype, shape or layout, and for a token that is not in the vocabulary.
        """
        num_tokens, hidden = y.shape
        y_address = contiguous_address(y, self._dtype)
        token_address = address(token_ids, torch.int64, (num_tokens,))
        self.native.embed(y_address, num_tokens, hidden, token_address, num_tokens, torch.get_num_threads())


class CpuLoraSlots:
    """Implements `kernels.ops.LoraSlots`: a slot refers to the weights where they are."""

    num_pages: int | None = None

    def __init__(self, shape: LoraShape, isa: _native.Isa) -> None:
        self._shape = shape
        self._isa = isa

    def prepare(self, weights: AdapterWeights) -> CpuAdapterWeights:
        """Raises ValueError where a tensor is not contiguous, on the CPU, in the model's dtype and of the shape that the model asks for."""
        if len(weights.sites) != len(self._shape.sites):
            raise ValueError(f"an adapter of {len(weights.sites)} sites for a model of {len(self._shape.sites)}")
        sites = [
            None if site is None else _native_site(site, shape, self._shape.dtype)
            for site, shape in zip(weights.sites, self._shape.sites, strict=True)
        ]
        embedding = None if weights.embedding is None else _native_embedding(weights.embedding, self._shape)
        return CpuAdapterWeights(weights.sites, weights.embedding, native=_native.LoraAdapter(sites, embedding))

    def num_pages_of(self, weights: AdapterWeights) -> int:
        return 0

    def plan(self, rows: Sequence[SlotRows]) -> CpuLoraPlan:
        """Raises ValueError where rows are empty, out of order or overlap, and where weights were not prepared."""
        return CpuLoraPlan(rows, self._shape.dtype, self._isa)


def _prepared(weights: AdapterWeights) -> CpuAdapterWeights:
    if not isinstance(weights, CpuAdapterWeights):
        raise ValueError("weights that `prepare` did not return")
    return weights


def _native_site(site: SiteWeights, shape: SiteShape, dtype: torch.dtype) -> _native.LoraSite:
    num_ranks = len(site.a)
    columns = [(each.out_start, each.out_end) for each in site.slices]
    if not set(columns) <= set(shape.slices) or len(set(columns)) < len(columns):
        raise ValueError(f"slices {columns} of a layer that has {list(shape.slices)}")
    return _native.LoraSite(
        a=address(site.a, dtype, (num_ranks, shape.in_features)),
        num_ranks=num_ranks,
        in_features=shape.in_features,
        out_features=max(out_end for _, out_end in shape.slices),
        slices=[_native_slice(each, num_ranks, dtype) for each in site.slices],
    )


def _native_embedding(embedding: EmbeddingWeights, shape: LoraShape) -> _native.LoraEmbedding:
    num_ranks = len(embedding.b)
    whole = SliceWeights(0, num_ranks, 0, shape.hidden_size, embedding.b, embedding.gain)
    return _native.LoraEmbedding(
        a=address(embedding.a, shape.dtype, (shape.vocab_size, num_ranks)),
        vocab_size=shape.vocab_size,
        slice=_native_slice(whole, num_ranks, shape.dtype),
    )


def _native_slice(part: SliceWeights, num_ranks: int, dtype: torch.dtype) -> _native.LoraSlice:
    if not 0 <= part.rank_start <= part.rank_end <= num_ranks:
        raise ValueError(f"ranks {part.rank_start} to {part.rank_end} of {num_ranks}")
    width = part.out_end - part.out_start
    return _native.LoraSlice(
        rank_start=part.rank_start,
        rank_end=part.rank_end,
        out_start=part.out_start,
        out_end=part.out_end,
        b=address(part.b, dtype, (part.rank_end - part.rank_start, width)),
        gain=0 if part.gain is None else address(part.gain, torch.float32, (width,)),
        shift=0 if part.shift is None else address(part.shift, torch.float32, (width,)),
    )
