"""The native decoder against `reference/decoder.py`, over random models and batches."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from loramux.kernels.ops import (
    AdapterWeights,
    AttentionBatch,
    DecoderShape,
    DecoderWeights,
    EmbeddingWeights,
    LayerWeights,
    LinearWeights,
    LoraLimits,
    LoraShape,
    Ops,
    Quantization,
    SiteShape,
    SiteWeights,
    SliceWeights,
    SlotRows,
    StepLora,
)
from loramux.kernels.reference.ops import ReferenceOps

_native = pytest.importorskip("loramux.kernels.cpu._native", reason="the native kernels are not built", exc_type=ImportError)

from loramux.kernels.cpu.ops import CpuOps  # noqa: E402

BLOCK_SIZE, NUM_BLOCKS = 32, 24
SHAPE = DecoderShape(101, 96, 160, 6, 2, 16, None, 1e-5, torch.float32)
SHAPES = {
    "whole": SHAPE,
    "odd": SHAPE._replace(vocab_size=37, hidden_size=42, intermediate_size=54, num_heads=3, num_kv_heads=3, head_dim=10),
    "window": SHAPE._replace(sliding_window=19, num_heads=4, num_kv_heads=1, head_dim=64),
}
TOLERANCE = 2e-5
"""Float32, of logits of about 1."""


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
    decoder = ops.decoder(shape, weights, quantization)
    slots = ops.lora_slots(lora_shape(shape, len(list(weights.layers))), LoraLimits(4, 64, 512))
    prepared = [slots.prepare(each) for each in adapters]
    caches = decoder.new_kv_caches(1 + max(block for seq in seqs for block in seq.blocks), BLOCK_SIZE)
    results = []
    for step in steps or spans(random.Random(seed), len(seqs)):
        starts = [0, *itertools.accumulate(end - start for start, end in step)]
        positions = torch.cat([torch.arange(start, end) for start, end in step])
        angles = positions[:, None] / 10 ** (torch.arange(shape.head_dim // 2) / shape.head_dim)
        table = torch.tensor([seq.blocks for seq in seqs])
        owners = torch.repeat_interleave(torch.arange(len(seqs)), torch.tensor([end - start for start, end in step]))
        kv_slots = table[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        attention = AttentionBatch(tuple(starts), tuple(end for _, end in step), table, kv_slots)
        rows = [
            SlotRows(starts[i], starts[i + 1], seq.adapter, (), prepared[seq.adapter])
            for i, seq in enumerate(seqs)
            if seq.adapter is not None
        ]
        token_ids = torch.tensor([token for seq, (start, end) in zip(seqs, step, strict=True) for token in seq.token_ids[start:end]])
        lora = StepLora(slots.plan(rows), slots.plan(rows)) if rows else None
        cos, sin = (torch.cat((table, table), 1) for table in (angles.cos(), angles.sin()))
        logits = decoder.forward(token_ids, cos, sin, caches, attention, lora, torch.arange(len(positions)))
        results.append(logits.clone())
    return torch.cat(results)


@pytest.fixture(params=_native.supported_isas(), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("owners", [[None] * 4, [0, 0, 1, None, 2, None, 1]], ids=["base", "adapters"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "extras"])
@pytest.mark.parametrize("name", SHAPES)
def test_float32_equals_the_reference(isa: Any, name: str, extras: bool, owners: list[int | None]) -> None:
    draw, shape = Random(random.randrange(2**31)), SHAPES[name]
    weights = draw.weights(shape, extras=extras, tied=not extras)
    adapters = [draw.adapter(lora_shape(shape, 2), rank) for rank in (3, 16, 8)]
    seqs = make_sequences(draw.rng, shape.vocab_size, owners)
    got, want = (run(ops, shape, weights, adapters, seqs, seed=1) for ops in (CpuOps(isa), ReferenceOps()))
    torch.testing.assert_close(got, want, atol=TOLERANCE * want.abs().max().item(), rtol=TOLERANCE)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_8_bits_equal_the_reference(isa: Any, tied: bool) -> None:
    draw = Random(random.randrange(2**31))
    weights = draw.weights(SHAPE, extras=True, tied=tied)
    adapters = [draw.adapter(lora_shape(SHAPE, 2), rank) for rank in (3, 16)]
    seqs = make_sequences(draw.rng, SHAPE.vocab_size, [None, 0, 1, 1])
    got, want = (run(ops, SHAPE, weights, adapters, seqs, 1, "int8") for ops in (CpuOps(isa), ReferenceOps()))
    torch.testing.assert_close(got, want, atol=TOLERANCE * want.abs().max().item(), rtol=TOLERANCE)


@pytest.mark.parametrize("owners", [[None] * 4, [0, 0, 1, None, 2, None, 1]], ids=["base", "adapters"])
def test_bfloat16_is_as_near_to_float32_as_the_reference(isa: Any, owners: list[int | None]) -> None:
    draw = Random(random.randrange(2**31))
    weights = draw.weights(SHAPE, extras=True)
    adapters = [draw.adapter(lora_shape(SHAPE, 2), rank) for rank in (3, 16, 8)]
    seqs = make_sequences(draw.rng, SHAPE.vocab_size, owners)
    want = run(ReferenceOps(), SHAPE, weights, adapters, seqs, seed=1)
    shape, weights = SHAPE._replace(dtype=torch.bfloat16), cast_weights(weights, torch.bfloat16)
    adapters = cast(adapters, torch.bfloat16)
    got, reference = (run(ops, shape, weights, adapters, seqs, seed=1) for ops in (CpuOps(isa), ReferenceOps()))
    assert (got - want).norm() < 1.2 * (reference - want).norm()


LONG_STEPS = [
    [(0, 2045), (0, 1020)],
    [(2045, 2051), (1020, 1029)],
    [(2051, 2052), (1029, 1030)],
    [(2052, 2180), (1030, 1033)],
    [(2180, 2181), (1033, 1034)],
    [(2181, 2183), (1034, 1100)],
]
"""Rows with one to three parts of 1,024 keys, alone and in chunks that are short enough to be joined, and in some that are not."""


@pytest.mark.parametrize("window", [None, 1500, 40])
def test_long_contexts_are_joined_from_parts(isa: Any, window: int | None) -> None:
    draw, shape = Random(random.randrange(2**31)), SHAPE._replace(sliding_window=window)
    weights = draw.weights(shape, extras=True)
    blocks = draw.rng.sample(range(140), 140)
    seqs = [Sequence(own, [draw.rng.randrange(shape.vocab_size) for _ in range(2240)], None) for own in (blocks[:70], blocks[70:])]
    want = run(ReferenceOps(), shape, weights, [], seqs, seed=0, steps=LONG_STEPS)
    got = run(CpuOps(isa), shape, weights, [], seqs, seed=0, steps=LONG_STEPS)
    torch.testing.assert_close(got, want, atol=TOLERANCE * want.abs().max().item(), rtol=TOLERANCE)
    halved, shape = cast_weights(weights, torch.bfloat16), shape._replace(dtype=torch.bfloat16)
    got, reference = (run(ops, shape, halved, [], seqs, seed=0, steps=LONG_STEPS) for ops in (CpuOps(isa), ReferenceOps()))
    assert (got - want).norm() < 1.2 * (reference - want).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(isa: Any, dtype: torch.dtype, set_num_threads: Callable[[int], None]) -> None:
    draw, shape = Random(random.randrange(2**31)), SHAPE._replace(dtype=dtype)
    weights = cast_weights(draw.weights(SHAPE), dtype)
    adapters = cast([draw.adapter(lora_shape(SHAPE, 2), rank) for rank in (3, 16)], dtype)
    seqs = make_sequences(draw.rng, shape.vocab_size, [None, 0, 1, 1])
    results = []
    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)
        results.append(run(CpuOps(isa), shape, weights, adapters, seqs, seed=2))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_weights_come_back_as_they_were_given() -> None:
    draw = Random(random.randrange(2**31))
    weights = draw.weights(SHAPES["odd"], extras=True, tied=False)
    decoder = CpuOps().decoder(SHAPES["odd"], weights)
    given = [linear for layer in weights.layers for linear in layer.linears] + [weights.head]
    for site, linear in enumerate(given):
        assert torch.equal(decoder.site_weight(site), linear.weight)
        assert decoder.site_bias(site) is linear.bias
    assert torch.equal(decoder.embedding_weight(), weights.embedding)


def test_what_does_not_fit_is_refused() -> None:
    draw = Random(0)
    weights = draw.weights(SHAPE)
    with pytest.raises(ValueError, match="shape"):
        CpuOps().decoder(SHAPE._replace(hidden_size=64), weights)
    with pytest.raises(ValueError, match="bfloat16"):
        CpuOps().decoder(SHAPE._replace(dtype=torch.bfloat16), weights)
    decoder = CpuOps().decoder(SHAPE, weights)
    caches = decoder.new_kv_caches(2, BLOCK_SIZE)
    batch = AttentionBatch((0, 2), (2,), torch.zeros(1, 1, dtype=torch.int64), torch.arange(2))
    table = torch.zeros(2, SHAPE.head_dim)
    fitting = [torch.arange(2), table, table, caches, batch, None, torch.tensor([1])]
    for index, wrong in [(0, torch.arange(2).int()), (1, table[:1]), (2, table.double()), (6, torch.tensor([1.0]))]:
        with pytest.raises(ValueError):
            decoder.forward(*fitting[:index], wrong, *fitting[index + 1 :])


def test_a_dtype_that_is_not_native_is_the_references(set_num_threads: Callable[[int], None]) -> None:
    draw = Random(random.randrange(2**31))
    shape = SHAPE._replace(dtype=torch.float16)
    weights = cast_weights(draw.weights(SHAPE), torch.float16)
    seqs = make_sequences(draw.rng, shape.vocab_size, [None, None])
    got, want = (run(ops, shape, weights, [], seqs, seed=3) for ops in (CpuOps(), ReferenceOps()))
    assert torch.equal(got, want)
