"""Attention over paged keys and values, interpreted, against the torch reference in float64."""

from __future__ import annotations

import random

import pytest
import torch

from loramux.kernels.reference.paged_attention import paged_attention as reference
from loramux.kernels.reference.paged_attention import plan_attention
from loramux.kernels.triton.paged_attention import HeadShape, PieceGroup, block_keys_of, paged_attention
from loramux.kernels.triton.pieces import Cutter
from loramux.kernels.triton.step_inputs import flat_tables
from tests.kernels.triton.batches import Paged, by_head, paged_batch

BORDERS = (1, 31, 32, 33, 63, 64, 65, 130)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(
    seed: int,
    heads: HeadShape,
    sequences: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 32,
    window: int | None = None,
    num_programs: int = 1,
) -> None:
    """Cells of no sequence, and those past a sequence's end, hold NaN, which must not be seen."""
    print(f"seed {seed}")
    paged = paged_batch(random.Random(seed), sequences, block_size)
    generator = torch.Generator().manual_seed(seed)
    size = (paged.num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
    k_cache, v_cache = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    num_rows, width = paged.batch.query_starts[-1], (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(num_rows, width, generator=generator).to(dtype)
    q = qkv[:, : heads.num_heads * heads.head_dim].reshape(num_rows, heads.num_heads, -1)
    scale = heads.head_dim**-0.5
    plan = plan_attention(paged.batch, block_size, window)
    want = reference(q.double(), k_cache.double(), v_cache.double(), plan, scale).flatten(1)
    poison = unused_cells(paged, block_size)
    for cache in (k_cache, v_cache):
        cache.flatten(0, 1)[poison] = float("nan")
    out = torch.full_like(want, float("nan"), dtype=dtype)
    tables, starts = flat_tables(paged.batch, block_size, scratch_block=0)
    cutter = Cutter(heads, block_keys_of(heads.head_dim, dtype), num_programs)
    for group in cutter.cut(paged.batch, starts):
        on_device = PieceGroup(torch.tensor(group.pieces, dtype=torch.int32), group.block_queries, group.num_splits)
        paged_attention(out, qkv, by_head(k_cache, v_cache), on_device, torch.from_numpy(tables), heads, scale, window)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def unused_cells(paged: Paged, block_size: int) -> torch.Tensor:
    unused = torch.ones(paged.num_blocks * block_size, dtype=torch.bool)
    for table, context in zip(paged.batch.block_tables, paged.batch.context_lens, strict=True):
        at = torch.arange(context)
        unused[table[at // block_size] * block_size + at % block_size] = False
    return unused


@pytest.mark.parametrize("num_programs", [1, 1000], ids=["whole", "split"])
@pytest.mark.parametrize("window", [None, 1, 33])
def test_decodes_equal_the_reference_around_block_borders(window: int | None, num_programs: int) -> None:
    check(1, HeadShape(4, 2, 16), [(context, 1) for context in BORDERS], window=window, num_programs=num_programs)


@pytest.mark.parametrize("num_programs", [1, 1000], ids=["whole", "split"])
@pytest.mark.parametrize("window", [None, 1, 33])
def test_chunks_and_decodes_equal_the_reference(window: int | None, num_programs: int) -> None:
    sequences = [(1, 1), (40, 40), (97, 1), (97, 2), (131, 65), (64, 33)]
    check(2, HeadShape(4, 2, 16), sequences, window=window, num_programs=num_programs)


@pytest.mark.parametrize(
    "heads",
    [HeadShape(9, 3, 64), HeadShape(7, 1, 96), HeadShape(2, 2, 128), HeadShape(5, 5, 80), HeadShape(6, 2, 13), HeadShape(32, 1, 17)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_shape_of_heads_equals_the_reference(heads: HeadShape, dtype: torch.dtype) -> None:
    check(3, heads, [(67, 1), (70, 35)], dtype=dtype, num_programs=8 * heads.num_kv_heads)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_blocks_of_every_size_equal_the_reference(block_size: int) -> None:
    check(4, HeadShape(4, 2, 32), [(99, 1), (65, 17)], block_size=block_size)


def test_bfloat16_equals_the_reference() -> None:
    check(5, HeadShape(4, 2, 32), [(99, 1), (65, 17)], dtype=torch.bfloat16, num_programs=16)


def test_random_batches_equal_the_reference() -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    for _ in range(4):
        group, num_kv_heads = rng.randint(1, 5), rng.randint(1, 3)
        contexts = [rng.randint(1, 150) for _ in range(rng.randint(1, 5))]
        sequences = [(context, rng.choice([1, rng.randint(1, context)])) for context in contexts]
        heads = HeadShape(group * num_kv_heads, num_kv_heads, rng.choice([16, 24, 64]))
        check(rng.randrange(2**31), heads, sequences, window=rng.choice([None, 20, 100]), num_programs=rng.choice([1, 12, 100]))


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    heads, block_size = HeadShape(2, 1, 16), 32
    paged = paged_batch(random.Random(6), [(40, 1), (40, 5)], block_size)
    caches = torch.randn(2, paged.num_blocks, block_size, 1, 16)
    qkv = torch.randn(6, 64)
    outs = []
    for value in (0.5, float("nan")):
        qkv[[0, 3]] = value
        out = torch.zeros(6, 32)
        tables, starts = flat_tables(paged.batch, block_size, scratch_block=0)
        for group in Cutter(heads, 64, 8).cut(paged.batch, starts):
            pieces = PieceGroup(torch.tensor(group.pieces, dtype=torch.int32), group.block_queries, group.num_splits)
            paged_attention(out, qkv, by_head(*caches), pieces, torch.from_numpy(tables), heads, 0.25, None)
        outs.append(out)
    others = [1, 2, 4, 5]
    assert torch.equal(outs[0][others], outs[1][others])
    assert outs[1][[0, 3]].isnan().all()
