"""The decoder for CUDA, interpreted, against `reference/decoder.py`: chunks, decodes, adapters, steps that are recorded and repeated."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.ops import AttentionBatch, Decoder, LoraLimits, Quantization, SlotRows, StepLora
from loramux.kernels.reference.ops import ReferenceOps
from loramux.kernels.triton.decoder import TritonDecoder, padded
from loramux.kernels.triton.graphs import MAX_ROWS, Call, Graphs, bucket_of
from loramux.kernels.triton.ops import TritonOps
from loramux.kernels.triton.pieces import HostPieces
from loramux.kernels.triton.step_inputs import HostInputs
from tests.kernels.decoder_cases import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SHAPE,
    SHAPES,
    Random,
    cast,
    cast_weights,
    lora_shape,
    make_sequences,
    run,
    run_decoder,
    spans,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2}
"""Of logits of about 1."""


class Recorder:
    """Counts what is recorded; a replay runs the call."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, call: Call) -> Call:
        self.num_recorded += 1

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            return call()

        return replay


@pytest.mark.parametrize("owners", [[None] * 3, [0, 0, None, 2, 1]], ids=["base", "adapters"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("whole", torch.float32), ("odd", torch.float32), ("window", torch.float32), ("whole", torch.float16)], ids=str
)
def test_logits_equal_the_reference(name: str, dtype: torch.dtype, owners: list[int | None]) -> None:
    draw, shape = Random(random.randrange(2**31)), SHAPES[name]._replace(dtype=dtype)
    extras = name != "whole"
    weights = cast_weights(draw.weights(shape, num_layers=1, extras=extras, tied=not extras), dtype)
    adapters = cast([draw.adapter(lora_shape(shape, 1), rank) for rank in (3, 16, 8)], dtype)
    seqs = make_sequences(draw.rng, shape.vocab_size, owners)
    got, want = (run(ops, shape, weights, adapters, seqs, seed=1) for ops in (TritonOps("cpu"), ReferenceOps()))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, atol=tolerance * want.abs().max().item(), rtol=tolerance)


def test_decodes_are_recorded_once_and_repeated_with_other_numbers() -> None:
    """Of five steps the last two are decodes, with adapters and without."""
    draw, recorder, limits = Random(random.randrange(2**31)), Recorder(), LoraLimits(4, 64, 512)
    weights = draw.weights(SHAPE, num_layers=1)
    decoder, slots = TritonDecoder(SHAPE, weights, capture=recorder), TritonOps("cpu").lora_slots(lora_shape(SHAPE, 1), limits)
    adapters = [draw.adapter(lora_shape(SHAPE, 1), 4)]
    seqs = make_sequences(draw.rng, SHAPE.vocab_size, [None, 0, None, 0, 0])
    got = run_decoder(decoder, slots, SHAPE, adapters, seqs, spans(random.Random(2), len(seqs)))
    assert recorder.num_recorded == 1
    assert recorder.num_replayed >= 2
    want = run(ReferenceOps(), SHAPE, weights, adapters, seqs, seed=2)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_8_bits_equal_the_reference(tied: bool) -> None:
    draw = Random(random.randrange(2**31))
    weights = draw.weights(SHAPE, num_layers=1, extras=True, tied=tied)
    adapters = [draw.adapter(lora_shape(SHAPE, 1), 3)]
    seqs = make_sequences(draw.rng, SHAPE.vocab_size, [None, 0])
    got, want = (run(ops, SHAPE, weights, adapters, seqs, 1, "int8") for ops in (TritonOps("cpu"), ReferenceOps()))
    torch.testing.assert_close(got, want, atol=2e-5 * want.abs().max().item(), rtol=2e-5)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_come_back_as_they_are_computed_with(quantization: Quantization | None) -> None:
    weights = Random(3).weights(SHAPE, extras=True, tied=False)
    got, want = (ops.decoder(SHAPE, weights, quantization) for ops in (TritonOps("cpu"), ReferenceOps()))
    for site in range(9):
        assert torch.equal(got.site_weight(site), want.site_weight(site))
        assert got.site_bias(site) is want.site_bias(site)
    assert torch.equal(got.embedding_weight(), want.embedding_weight())


def decode(decoder: Decoder, caches: Any, num_rows: int, lora: StepLora | None, logit_rows: list[int] | None = None) -> torch.Tensor:
    """The first token of so many sequences, in blocks 4, 5, ..."""
    blocks, table = torch.arange(4, 4 + num_rows), torch.ones(num_rows, SHAPE.head_dim)
    batch = AttentionBatch(tuple(range(num_rows + 1)), (1,) * num_rows, blocks[:, None], blocks * BLOCK_SIZE)
    rows = torch.tensor(list(range(num_rows)) if logit_rows is None else logit_rows)
    return decoder.forward(torch.arange(num_rows), table, table, caches, batch, lora, rows)


@pytest.mark.parametrize(("num_rows", "is_recorded"), [(2, True), (3, False)])
def test_a_decode_that_is_padded_to_more_rows_than_adapters_may_have_is_not_recorded(num_rows: int, is_recorded: bool) -> None:
    draw, recorder = Random(5), Recorder()
    decoder = TritonDecoder(SHAPE, draw.weights(SHAPE, num_layers=1), capture=recorder)
    slots = TritonOps("cpu").lora_slots(lora_shape(SHAPE, 1), LoraLimits(4, 8, max_num_tokens=3))
    weights = slots.prepare(draw.adapter(lora_shape(SHAPE, 1), 4))
    rows = [SlotRows(1, num_rows, 0, (0, 1), weights)]
    decode(decoder, decoder.new_kv_caches(NUM_BLOCKS, BLOCK_SIZE), num_rows, StepLora(slots.plan(rows), slots.plan(rows)))
    assert recorder.num_recorded == int(is_recorded)


def test_a_padded_decode_writes_to_no_block_of_anyones() -> None:
    recorder = Recorder()
    decoder = TritonDecoder(SHAPE, Random(7).weights(SHAPE, num_layers=1), capture=recorder)
    caches = decoder.new_kv_caches(NUM_BLOCKS, BLOCK_SIZE)
    assert decode(decoder, caches, 3, None).shape == (3, SHAPE.vocab_size)
    assert recorder.num_replayed == 1
    written = caches.layers[0].v.flatten(1).count_nonzero(1).nonzero().flatten().tolist()
    assert written == [4, 5, 6, caches.scratch_block]


def test_a_step_that_wants_other_logits_is_not_recorded() -> None:
    recorder, weights = Recorder(), Random(8).weights(SHAPE, num_layers=1)
    decoders = (TritonDecoder(SHAPE, weights, capture=recorder), ReferenceOps().decoder(SHAPE, weights))
    got, want = (decode(each, each.new_kv_caches(NUM_BLOCKS, BLOCK_SIZE), 3, None, [0, 2]) for each in decoders)
    assert recorder.num_recorded == 0
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_buckets_hold_their_rows_and_are_few() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 64, 65)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 24, 32, 64, 72]
    assert {bucket_of(rows) for rows in range(1, MAX_ROWS + 1)} == {1, 2, 4, *range(8, MAX_ROWS + 1, 8)}


def test_rows_are_padded_with_rows_that_see_the_scratch_block_alone() -> None:
    ones = np.ones((3, 4), dtype=np.float32)
    numbers = np.array([5, 6, 7], dtype=np.int32)
    group = HostPieces([(row, 1, 40, 1 + row) for row in range(3)], 1, 2)
    made = padded(
        HostInputs(numbers, numbers, ones, ones, numbers, np.zeros((0, 3), np.int32), (group,), numbers), 4, scratch_slot=99, num_splits=8
    )
    assert made.token_ids.tolist() == [5, 6, 7, 0]
    assert made.kv_slots.tolist() == [5, 6, 7, 99]
    assert made.cos.shape == made.sin.shape == (4, 4)
    assert made.logit_rows.tolist() == [0, 1, 2, 3]
    assert made.groups == (HostPieces([*group.pieces, (3, 1, 0, 0)], 1, 8),)


def test_what_is_recorded_reads_what_was_moved_in_last() -> None:
    graphs = Graphs(8, torch.device("cpu"), Recorder())
    results = [graphs.run("double", torch.full((4,), value, dtype=torch.int32), lambda: graphs.buffer[:4] * 2).tolist() for value in (1, 3)]
    assert results == [[2] * 4, [6] * 4]
    assert graphs.fits(torch.zeros(8)) and not graphs.fits(torch.zeros(9))
