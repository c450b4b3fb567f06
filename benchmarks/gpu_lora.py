"""Adapters on a GPU: random batches against the torch reference on the CPU, and what they add to a layer of a Llama 8B."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise, product
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from loramux.kernels.ops import (
    AdapterWeights,
    EmbeddingWeights,
    LoraLimits,
    LoraPlan,
    LoraShape,
    LoraSlots,
    Ops,
    SiteShape,
    SiteWeights,
    SliceWeights,
    SlotRows,
)
from loramux.kernels.reference.ops import ReferenceOps

PARITY_SHAPE = LoraShape(
    (SiteShape(1024, ((0, 1024), (1024, 1280), (1280, 1536))), SiteShape(2048, ((0, 600), (600, 1200))), SiteShape(37, ((0, 61),))),
    vocab_size=1003,
    hidden_size=512,
    dtype=torch.float32,
)
PARITY_ROWS = (1, 7, 16, 64, 131, 257, 1000)
RANKS = (1, 2, 3, 5, 8, 13, 16, 31, 32, 64)
POPULARITIES: dict[str, Callable[[random.Random, int], list[int]]] = {
    "identical": lambda rng, num_rows: [0] * num_rows,
    "distinct": lambda rng, num_rows: list(range(min(num_rows, 64))),
    "uniform": lambda rng, num_rows: rng.choices(range(16), k=num_rows),
    "zipf": lambda rng, num_rows: rng.choices(range(32), [1 / (1 + each) for each in range(32)], k=num_rows),
}
"""The adapter of each row, in any order; rows past them are nobody's."""

LLAMA_8B = {
    "qkv": SiteShape(4096, ((0, 4096), (4096, 5120), (5120, 6144))),
    "o": SiteShape(4096, ((0, 4096),)),
    "gate_up": SiteShape(4096, ((0, 14336), (14336, 28672))),
    "down": SiteShape(14336, ((0, 4096),)),
}
NUM_LAYERS = 4
"""Enough that the weights of one are gone from the cache when its turn comes again: 67 MB or more of a site."""
DECODE_ROWS, PREFILL_ROWS = (1, 4, 16, 64, 256), (512, 2048)
DECODE_ADAPTERS, TIMED_RANKS = (1, 8, 32), (16, 64)
DTYPE = torch.bfloat16


class Draw:
    """Everything random, from one seed; drawn on the CPU, so that every device sees the same."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.rng = random.Random(seed)
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, num_rows: int, num_columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(num_rows, num_columns, generator=self._generator) * scale).to(self._dtype)

    def vector(self, size: int) -> torch.Tensor | None:
        """Half the time."""
        return torch.randn(size, generator=self._generator) if self.rng.random() < 0.5 else None

    def tokens(self, count: int, vocab_size: int) -> torch.Tensor:
        return torch.randint(vocab_size, (count,), generator=self._generator)

    def adapter(self, shape: LoraShape, ranks: Sequence[int]) -> AdapterWeights:
        """A rank for each slice."""
        rank = self.rng.choice(ranks)
        a, b = self.matrix(shape.vocab_size, rank), self.matrix(rank, shape.hidden_size, rank**-0.5)
        return AdapterWeights(tuple(self.site(site, ranks) for site in shape.sites), EmbeddingWeights(a, b, self.vector(b.shape[1])))

    def site(self, shape: SiteShape, ranks: Sequence[int]) -> SiteWeights:
        slices: list[SliceWeights] = []
        rank_end = 0
        for start, end in shape.slices:
            rank_start, rank_end = rank_end, rank_end + self.rng.choice(ranks)
            rank, width = rank_end - rank_start, end - start
            b = self.matrix(rank, width, rank**-0.5)
            slices.append(SliceWeights(rank_start, rank_end, start, end, b, self.vector(width), self.vector(width)))
        return SiteWeights(self.matrix(rank_end, shape.in_features, shape.in_features**-0.5), tuple(slices))

    def segments(self, num_rows: int, popularity: str) -> list[tuple[int, int]]:
        """Rows of each adapter, one after another."""
        ends = [0]
        for _, rows in groupby(sorted(POPULARITIES[popularity](self.rng, num_rows))):
            ends.append(ends[-1] + len(list(rows)))
        return list(pairwise(ends))


class Prepared(NamedTuple):
    weights: AdapterWeights
    num_pages: int


def prepare(slots: LoraSlots, weights: AdapterWeights) -> Prepared:
    return Prepared(slots.prepare(weights), slots.num_pages_of(weights))


def slot_rows(adapters: Sequence[Prepared], segments: Sequence[tuple[int, int]]) -> list[SlotRows]:
    """Slot i for adapter i and segment i."""
    rows: list[SlotRows] = []
    page = 0
    for slot, ((weights, num_pages), (start, end)) in enumerate(zip(adapters, segments, strict=True)):
        rows.append(SlotRows(start, end, slot, tuple(range(page, page + num_pages)), weights))
        page += num_pages
    return rows


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""A call that repeats another on the same tensors."""


class Parity:
    """Random batches on a device against the torch reference on the CPU."""

    def __init__(self, ops: Ops, device: str, shape: LoraShape, max_num_rows: int) -> None:
        self._device = device
        self._shape = shape
        limits = LoraLimits(num_slots=64, max_rank=64, max_num_tokens=max_num_rows)
        self._slots, self._reference = ops.lora_slots(self._shape, limits), ReferenceOps().lora_slots(self._shape, limits)

    def worst(self, num_rows: int, popularity: str) -> float:
        """The largest difference over all layers."""
        draw = Draw(num_rows, self._shape.dtype)
        got, want = self._plans(*self._batch(draw, num_rows, popularity))
        worst = [self._worst_at(site, got, want, draw, num_rows) for site in range(len(self._shape.sites))]
        y, token_ids = draw.matrix(num_rows, self._shape.hidden_size), draw.tokens(num_rows, self._shape.vocab_size)
        on_device = y.to(self._device, copy=True)
        want.embed(y, token_ids)
        got.embed(on_device, token_ids.to(self._device))
        return max(*worst, relative_difference(on_device, y))

    def worst_after_refill(self, capture: Capture, num_rows: int = 33) -> float:
        """The largest difference of a captured call whose plan is then filled with a batch of other adapters and rows."""
        from loramux.kernels.triton.lora import TritonLoraPlan

        draw = Draw(num_rows, self._shape.dtype)
        plan, _ = self._plans(*self._batch(draw, num_rows, "zipf"))
        assert isinstance(plan, TritonLoraPlan)
        in_features, slices = self._shape.sites[0]
        x, y = draw.matrix(num_rows, in_features), draw.matrix(num_rows, slices[-1][1])
        x_on_device, y_on_device = x.to(self._device), y.to(self._device, copy=True)
        replay = capture(lambda: plan.apply(0, y_on_device, x_on_device))
        adapters, segments = self._batch(draw, num_rows, "uniform")
        plan.refill(slot_rows([prepare(self._slots, each) for each in adapters], segments))
        y_on_device.copy_(y)
        replay()
        self._plans(adapters, segments)[1].apply(0, y, x)
        return relative_difference(y_on_device, y)

    def repeats(self, num_rows: int) -> bool:
        """Whether the same batch gives the same bits twice."""
        draw = Draw(num_rows, self._shape.dtype)
        plan, _ = self._plans(*self._batch(draw, num_rows, "uniform"))
        in_features, slices = self._shape.sites[0]
        x, y = draw.matrix(num_rows, in_features).to(self._device), draw.matrix(num_rows, slices[-1][1]).to(self._device)
        again = y.clone()
        plan.apply(0, y, x)
        plan.apply(0, again, x)
        return torch.equal(y, again)

    def _batch(self, draw: Draw, num_rows: int, popularity: str) -> tuple[list[AdapterWeights], list[tuple[int, int]]]:
        segments = draw.segments(num_rows, popularity)
        return [draw.adapter(self._shape, RANKS) for _ in segments], segments

    def _plans(self, adapters: Sequence[AdapterWeights], segments: Sequence[tuple[int, int]]) -> tuple[LoraPlan, LoraPlan]:
        """On the device, and the reference's."""
        both = (self._slots, self._reference)
        got, want = (slots.plan(slot_rows([prepare(slots, each) for each in adapters], segments)) for slots in both)
        return got, want

    def _worst_at(self, site: int, got: LoraPlan, want: LoraPlan, draw: Draw, num_rows: int) -> float:
        in_features, slices = self._shape.sites[site]
        x, y = draw.matrix(num_rows, in_features), draw.matrix(num_rows, slices[-1][1])
        on_device = y.to(self._device, copy=True)
        want.apply(site, y, x)
        got.apply(site, on_device, x.to(self._device))
        return relative_difference(on_device, y)


def relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest |got - want| / (1 + |want|); infinite where either has a NaN."""
    expected = want.double().cpu()
    return float(((got.double().cpu() - expected).abs() / (1 + expected.abs())).nan_to_num(nan=math.inf).max())


class Batch(NamedTuple):
    """Rows shared evenly by adapters of one rank."""

    num_rows: int
    num_adapters: int
    rank: int


def timed_batches() -> list[Batch]:
    decode = [Batch(*each) for each in product(DECODE_ROWS, DECODE_ADAPTERS, TIMED_RANKS) if each[1] <= each[0]]
    return decode + [Batch(rows, 1, rank) for rows, rank in product(PREFILL_ROWS, TIMED_RANKS)]


Measure = Callable[[Callable[[], None]], float]
"""Microseconds of a call."""


class LayerTimes:
    """Times the linear layers of a decoder's layers without and with adapters, every layer with weights of its own."""

    def __init__(self, ops: Ops, device: str, sites: dict[str, SiteShape], largest: Sequence[Batch]) -> None:
        """Room for the largest of these batches."""
        self._device, self._sites = device, sites
        shape = LoraShape(tuple(sites.values()) * NUM_LAYERS, vocab_size=128, hidden_size=128, dtype=DTYPE)
        num_slots, max_rank = (max(batch.num_adapters for batch in largest), max(batch.rank for batch in largest))
        self._slots = ops.lora_slots(shape, LoraLimits(num_slots, max_rank, max(batch.num_rows for batch in largest)))
        draw = Draw(0, DTYPE)
        ranks = {batch.rank for batch in largest}
        self._adapters = {rank: prepare(self._slots, _plain(draw.adapter(shape, [rank]))) for rank in ranks}

    def times(self, measure: Measure, batches: Sequence[Batch]) -> dict[str, dict[str, float]]:
        """By site and number of rows: microseconds of the linear alone as `base`, and what `adapters x rank` add to it."""
        all_rows = sorted({batch.num_rows for batch in batches})
        return {
            f"{name}-{num_rows}": self._times_of(name, measure, [batch for batch in batches if batch.num_rows == num_rows])
            for name, num_rows in product(self._sites, all_rows)
        }

    def _times_of(self, name: str, measure: Measure, batches: Sequence[Batch]) -> dict[str, float]:
        """batches are of one number of rows."""
        in_features, slices = self._sites[name]
        x = torch.randn(batches[0].num_rows, in_features, dtype=DTYPE, device=self._device)
        weights = [torch.randn(slices[-1][1], in_features, dtype=DTYPE, device=self._device) for _ in range(NUM_LAYERS)]
        first = list(self._sites).index(name)

        def run(lora: LoraPlan | None) -> None:
            for layer, weight in enumerate(weights):
                y = F.linear(x, weight)
                if lora is not None:
                    lora.apply(first + layer * len(self._sites), y, x)

        base = measure(lambda: run(None))
        with_lora = {f"{batch.num_adapters}x{batch.rank}": measure(partial(run, self._plan(batch))) for batch in batches}
        added = {batch: round((microseconds - base) / NUM_LAYERS, 2) for batch, microseconds in with_lora.items()}
        return {"base": round(base / NUM_LAYERS, 2), **added}

    def _plan(self, batch: Batch) -> LoraPlan:
        bounds = [batch.num_rows * each // batch.num_adapters for each in range(batch.num_adapters + 1)]
        return self._slots.plan(slot_rows([self._adapters[batch.rank]] * batch.num_adapters, list(pairwise(bounds))))


def _plain(weights: AdapterWeights) -> AdapterWeights:
    """At linear layers alone, without gains and shifts."""
    return AdapterWeights(tuple(None if site is None else _without_vectors(site) for site in weights.sites))


def _without_vectors(site: SiteWeights) -> SiteWeights:
    return replace(site, slices=tuple(each._replace(gain=None, shift=None) for each in site.slices))


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """The replay of a CUDA graph that holds the call, which is run once before, so that its kernels are compiled."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def graph_us(call: Callable[[], None]) -> float:
    return eager_us(captured(call))


def eager_us(call: Callable[[], None], *, num_calls: int = 20) -> float:
    """The least of three means."""
    call()
    means = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(num_calls):
            call()
        end.record()
        end.synchronize()
        means.append(start.elapsed_time(end) * 1000 / num_calls)
    return min(means)
