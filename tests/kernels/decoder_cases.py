"""Random models, adapters and batches for a decoder, and the logits that it gives."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any, NamedTuple

import torch

from loramux.kernels.ops import (
    AdapterWeights,
    AttentionBatch,
    Decoder,
    DecoderShape,
    DecoderWeights,
    EmbeddingWeights,
    LayerWeights,
    LinearWeights,
    LoraLimits,
    LoraShape,
    LoraSlots,
    Ops,
    Quantization,
    SiteShape,
    SiteWeights,
    SliceWeights,
    SlotRows,
    StepLora,
)

BLOCK_SIZE, NUM_BLOCKS = 32, 24
SHAPE = DecoderShape(101, 96, 160, 6, 2, 16, None, 1e-5, torch.float32)
SHAPES = {
    "whole": SHAPE,
    "odd": SHAPE._replace(vocab_size=37, hidden_size=42, intermediate_size=54, num_heads=3, num_kv_heads=3, head_dim=10),
    "window": SHAPE._replace(sliding_window=19, num_heads=4, num_kv_heads=1, head_dim=64),
}


class Random:
    """Weights from one seed, in float32 and exact in bfloat16."""

    def __init__(self, seed: int) -> None:
        print(f"seed {seed}")
        self.rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=self._generator) * scale).bfloat16().float()

    def norm(self, size: int) -> torch.Tensor:
        return (1 + self.tensor(size, scale=0.2)).bfloat16().float()

    def linear(self, out: int, size: int, *, bias: bool = False) -> LinearWeights:
        return LinearWeights(self.tensor(out, size, scale=size**-0.5), self.tensor(out) if bias else None)

    def weights(self, shape: DecoderShape, *, num_layers: int = 2, extras: bool = False, tied: bool = True) -> DecoderWeights:
        """`extras` are biases and norms of heads."""
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        embedding = self.tensor(shape.vocab_size, shape.hidden_size)
        layers = [
            LayerWeights(
                input_norm=self.norm(shape.hidden_size),
                qkv=self.linear(query + 2 * kv, shape.hidden_size, bias=extras),
                q_norm=self.norm(shape.head_dim) if extras else None,
                k_norm=self.norm(shape.head_dim) if extras else None,
                o=self.linear(shape.hidden_size, query, bias=extras),
                post_attention_norm=self.norm(shape.hidden_size),
                gate_up=self.linear(2 * shape.intermediate_size, shape.hidden_size),
                down=self.linear(shape.hidden_size, shape.intermediate_size),
            )
            for _ in range(num_layers)
        ]
        head = LinearWeights(embedding) if tied else self.linear(shape.vocab_size, shape.hidden_size)
        return DecoderWeights(embedding, layers, self.norm(shape.hidden_size), head)

    def adapter(self, shape: LoraShape, rank: int) -> AdapterWeights:
        sites = [self._site(site, rank) if self.rng.random() < 0.8 else None for site in shape.sites]
        b = self.tensor(rank, shape.hidden_size, scale=rank**-0.5)
        return AdapterWeights(tuple(sites), EmbeddingWeights(self.tensor(shape.vocab_size, rank), b, self.norm(shape.hidden_size)))

    def _site(self, site: SiteShape, rank: int) -> SiteWeights:
        slices = [
            SliceWeights(
                rank * index,
                rank * (index + 1),
                start,
                end,
                self.tensor(rank, end - start, scale=rank**-0.5),
                self.norm(end - start) if self.rng.random() < 0.3 else None,
                self.tensor(end - start) if self.rng.random() < 0.3 else None,
            )
            for index, (start, end) in enumerate(site.slices)
        ]
        return SiteWeights(self.tensor(rank * len(slices), site.in_features, scale=site.in_features**-0.5), tuple(slices))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every tensor inside, but those that are always float32."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if isinstance(value, SliceWeights):
        return value._replace(b=value.b.to(dtype))
    if isinstance(value, EmbeddingWeights):
        return dataclasses.replace(value, a=value.a.to(dtype), b=value.b.to(dtype))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{field.name: cast(getattr(value, field.name), dtype) for field in dataclasses.fields(value)})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(each, dtype) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(cast(each, dtype) for each in value)
    return value


def cast_weights(weights: DecoderWeights, dtype: torch.dtype) -> DecoderWeights:
    """A tied head stays tied."""
    made: DecoderWeights = cast(weights, dtype)
    return dataclasses.replace(made, head=LinearWeights(made.embedding)) if weights.head.weight is weights.embedding else made


def lora_shape(shape: DecoderShape, num_layers: int) -> LoraShape:
    query, kv, hidden = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden_size
    layer = (
        SiteShape(hidden, ((0, query), (query, query + kv), (query + kv, query + 2 * kv))),
        SiteShape(query, ((0, hidden),)),
        SiteShape(hidden, ((0, shape.intermediate_size), (shape.intermediate_size, 2 * shape.intermediate_size))),
        SiteShape(shape.intermediate_size, ((0, hidden),)),
    )
    return LoraShape((*layer * num_layers, SiteShape(hidden, ((0, shape.vocab_size),))), shape.vocab_size, hidden, shape.dtype)


class Sequence(NamedTuple):
    blocks: list[int]
    token_ids: list[int]
    adapter: int | None


def make_sequences(rng: random.Random, vocab_size: int, owners: list[int | None]) -> list[Sequence]:
    """In the order of their adapters, as the runner has them; each may grow to three blocks."""
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    ordered = sorted(owners, key=lambda owner: -1 if owner is None else owner)
    return [
        Sequence([free.pop() for _ in range(3)], [rng.randrange(vocab_size) for _ in range(3 * BLOCK_SIZE)], owner) for owner in ordered
    ]


def spans(rng: random.Random, num_seqs: int) -> list[list[tuple[int, int]]]:
    """Steps, each with (start, end) of every sequence's tokens: chunks at first, single tokens then."""
    done = [0] * num_seqs
    steps = []
    for step in range(5):
        counts = [rng.choice([1, rng.randint(1, 23)]) if step < 3 else 1 for _ in done]
        steps.append([(at, at + count) for at, count in zip(done, counts, strict=True)])
        done = [at + count for at, count in zip(done, counts, strict=True)]
    return steps


def owned(seqs: list[Sequence]) -> list[tuple[int, int, int]]:
    """(adapter, first, end) of neighbouring sequences of one adapter; base sequences are left out."""
    runs = []
    first = 0
    for adapter, group in itertools.groupby(seq.adapter for seq in seqs):
        end = first + len(list(group))
        if adapter is not None:
            runs.append((adapter, first, end))
        first = end
    return runs


def run(
    ops: Ops,
    shape: DecoderShape,
    weights: DecoderWeights,
    adapters: list[AdapterWeights],
    seqs: list[Sequence],
    seed: int,
    quantization: Quantization | None = None,
    steps: list[list[tuple[int, int]]] | None = None,
) -> torch.Tensor:
    """float32 logits of every token of every step [tokens, vocab]; the steps are drawn from the seed if not given."""
    slots = ops.lora_slots(lora_shape(shape, len(list(weights.layers))), LoraLimits(4, 64, 512))
    return run_decoder(
        ops.decoder(shape, weights, quantization), slots, shape, adapters, seqs, steps or spans(random.Random(seed), len(seqs))
    )


def run_decoder(
    decoder: Decoder,
    slots: LoraSlots,
    shape: DecoderShape,
    adapters: list[AdapterWeights],
    seqs: list[Sequence],
    steps: list[list[tuple[int, int]]],
) -> torch.Tensor:
    """The same of a decoder that is there."""
    prepared = [slots.prepare(each) for each in adapters]
    counts = [slots.num_pages_of(each) for each in adapters]
    pages = [tuple(range(end - count, end)) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
    caches = decoder.new_kv_caches(1 + max(block for seq in seqs for block in seq.blocks), BLOCK_SIZE)
    results = []
    for step in steps:
        starts = [0, *itertools.accumulate(end - start for start, end in step)]
        positions = torch.cat([torch.arange(start, end) for start, end in step])
        angles = positions[:, None] / 10 ** (torch.arange(shape.head_dim // 2) / shape.head_dim)
        table = torch.tensor([seq.blocks for seq in seqs])
        owners = torch.repeat_interleave(torch.arange(len(seqs)), torch.tensor([end - start for start, end in step]))
        kv_slots = table[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        attention = AttentionBatch(tuple(starts), tuple(end for _, end in step), table, kv_slots)
        rows = [SlotRows(starts[first], starts[end], each, pages[each], prepared[each]) for each, first, end in owned(seqs)]
        token_ids = torch.tensor([token for seq, (start, end) in zip(seqs, step, strict=True) for token in seq.token_ids[start:end]])
        lora = StepLora(slots.plan(rows), slots.plan(rows)) if rows else None
        cos, sin = (torch.cat((table, table), 1) for table in (angles.cos(), angles.sin()))
        logits = decoder.forward(token_ids, cos, sin, caches, attention, lora, torch.arange(len(positions)))
        results.append(logits.clone())
    return torch.cat(results)
