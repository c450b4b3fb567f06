"""The native decoder against `reference/decoder.py`, over random models and batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from loramux.kernels.ops import AttentionBatch
from loramux.kernels.reference.ops import ReferenceOps
from tests.kernels.decoder_cases import BLOCK_SIZE, SHAPE, SHAPES, Random, Sequence, cast, cast_weights, lora_shape, make_sequences, run

_native = pytest.importorskip("loramux.kernels.cpu._native", reason="the native kernels are not built", exc_type=ImportError)

from loramux.kernels.cpu.ops import CpuOps  # noqa: E402

TOLERANCE = 2e-5
"""Float32, of logits of about 1."""


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
