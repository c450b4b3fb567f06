"""Random batches of adapters, and what an update must give: the equation in float64, a segment and a slice at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch

from loramux.kernels.ops import (
    AdapterWeights,
    EmbeddingWeights,
    LoraPlan,
    LoraShape,
    LoraSlots,
    SiteShape,
    SiteWeights,
    SliceWeights,
    SlotRows,
)

TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.float16: (1e-3, 1e-3), torch.bfloat16: (4e-3, 1e-4)}
"""Relative and absolute, by the dtype of y: every implementation sums in float32 and rounds y once, to half a unit in its last place."""

RANKS = (1, 2, 3, 5, 8, 13, 16, 31, 32, 64, 127, 128)

POPULARITIES: dict[str, Callable[[random.Random, int], list[int]]] = {
    "identical": lambda rng, num_rows: [0] * num_rows,
    "distinct": lambda rng, num_rows: list(range(num_rows)),
    "uniform": lambda rng, num_rows: [rng.randrange(math.isqrt(num_rows) + 1) for _ in range(num_rows)],
    "zipf": lambda rng, num_rows: rng.choices(range(16), [1 / (1 + each) for each in range(16)], k=num_rows),
}
"""The adapter of each row, in any order."""

SITES = (
    SiteShape(64, ((0, 96), (96, 128), (128, 160))),
    SiteShape(37, ((0, 61),)),
    SiteShape(97, ((0, 29), (29, 131))),
    SiteShape(160, ((0, 64),)),
)
"""Whole and broken vectors along both dimensions; one, two and three slices."""
VOCAB_SIZE, HIDDEN_SIZE = 53, 64


@dataclass(frozen=True)
class LoraCase:
    """A batch of num_rows rows; an adapter of `adapters` answers for each segment (start, end, adapter), nobody for the rest."""

    shape: LoraShape
    adapters: tuple[AdapterWeights, ...]
    num_rows: int
    segments: tuple[tuple[int, int, int], ...]


class Draw:
    """Everything random in a case, from one seed, which it prints."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        print(f"seed {seed}, {dtype}")
        self.rng = random.Random(seed)
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, num_rows: int, num_columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(num_rows, num_columns, generator=self._generator) * scale).to(self.dtype)

    def vector(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator)

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randint(VOCAB_SIZE, (count,), generator=self._generator)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def adapter(self, ranks: tuple[int, ...] = RANKS) -> AdapterWeights:
        """Partial sites, missing slices, a rank for each slice, gains, shifts, slices that only shift."""
        sites = tuple(None if self.chance(0.2) else self.site(shape, ranks) for shape in SITES)
        return AdapterWeights(sites, self.embedding(ranks) if self.chance(0.7) else None)

    def site(self, shape: SiteShape, ranks: tuple[int, ...] = RANKS) -> SiteWeights:
        present = [each for each in shape.slices if self.chance(0.7)] or list(shape.slices)
        slices: list[SliceWeights] = []
        rank_end = 0
        for out_start, out_end in present:
            rank_start, rank_end = rank_end, rank_end + (0 if self.chance(0.1) else self.rng.choice(ranks))
            width, rank = out_end - out_start, rank_end - rank_start
            b = self.matrix(rank, width, 1 / max(rank, 1) ** 0.5)
            gain = self.vector(width) if self.chance(0.3) else None
            shift = self.vector(width) if rank == 0 or self.chance(0.3) else None
            slices.append(SliceWeights(rank_start, rank_end, out_start, out_end, b, gain, shift))
        return SiteWeights(self.matrix(rank_end, shape.in_features, shape.in_features**-0.5), tuple(slices))

    def embedding(self, ranks: tuple[int, ...] = RANKS) -> EmbeddingWeights:
        rank = self.rng.choice(ranks)
        gain = self.vector(HIDDEN_SIZE) if self.chance(0.5) else None
        return EmbeddingWeights(self.matrix(VOCAB_SIZE, rank), self.matrix(rank, HIDDEN_SIZE, rank**-0.5), gain)

    def case(self, num_rows: int, popularity: str, ranks: tuple[int, ...] = RANKS) -> LoraCase:
        """Each adapter's rows are neighbours; where there are several adapters, rows that were one's are nobody's."""
        owners = sorted(POPULARITIES[popularity](self.rng, num_rows))
        nobody = self.rng.choice(owners) if len(set(owners)) > 1 else None
        names = sorted(set(owners) - {nobody})
        segments: list[tuple[int, int, int]] = []
        row = 0
        for owner, its_rows in groupby(owners):
            count = len(list(its_rows))
            if owner != nobody:
                segments.append((row, row + count, names.index(owner)))
            row += count
        adapters = tuple(self.adapter(ranks) for _ in names)
        return LoraCase(LoraShape(SITES, VOCAB_SIZE, HIDDEN_SIZE, self.dtype), adapters, num_rows, tuple(segments))


def plan(slots: LoraSlots, case: LoraCase) -> LoraPlan:
    """Slot i, and the next pages that are free, for adapter i."""
    prepared = [slots.prepare(each) for each in case.adapters]
    pages: list[tuple[int, ...]] = []
    for each in case.adapters:
        taken = sum(map(len, pages))
        pages.append(tuple(range(taken, taken + slots.num_pages_of(each))))
    return slots.plan([SlotRows(start, end, slot, pages[slot], prepared[slot]) for start, end, slot in case.segments])


def expected_at_site(case: LoraCase, site: int, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """float64 [T, out]"""
    want = y.double()
    for start, end, adapter in case.segments:
        weights = case.adapters[adapter].sites[site]
        for part in weights.slices if weights else ():
            columns = slice(part.out_start, part.out_end)
            a = weights.a[part.rank_start : part.rank_end]
            delta = x[start:end].double() @ a.double().T @ part.b.double()
            want[start:end, columns] = _changed(want[start:end, columns], delta, part.gain, part.shift)
    return want


def expected_embeddings(case: LoraCase, y: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float64 [T, hidden]"""
    want = y.double()
    for start, end, adapter in case.segments:
        weights = case.adapters[adapter].embedding
        if weights:
            delta = weights.a[token_ids[start:end]].double() @ weights.b.double()
            want[start:end] = _changed(want[start:end], delta, weights.gain, None)
    return want


def _changed(y: torch.Tensor, delta: torch.Tensor, gain: torch.Tensor | None, shift: torch.Tensor | None) -> torch.Tensor:
    return y * (1 if gain is None else gain) + delta + (0 if shift is None else shift)


def assert_as_expected(got: torch.Tensor, want: torch.Tensor) -> None:
    rtol, atol = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)
