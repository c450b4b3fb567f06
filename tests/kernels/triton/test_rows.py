from __future__ import annotations

import random

import pytest
import torch

from loramux.kernels.ops import AdapterWeights, LoraLimits, SlotRows
from loramux.kernels.triton.rows import RowBlocks, block_rows_of

LIMITS = LoraLimits(num_slots=5, max_rank=8, max_num_tokens=300)
CPU = torch.device("cpu")


def rows(*segments: tuple[int, int, int]) -> list[SlotRows]:
    """Of (start, end, slot)."""
    return [SlotRows(start, end, slot, (), AdapterWeights(())) for start, end, slot in segments]


def test_a_segment_is_cut_into_blocks() -> None:
    blocks = RowBlocks(LIMITS, 16, CPU)
    blocks.fill(rows((2, 3, 4), (7, 44, 0)))
    assert blocks.table[:5].tolist() == [[4, 2, 3], [0, 7, 23], [0, 23, 39], [0, 39, 44], [-1, 0, 0]]
    assert (blocks.table[4:, 0] == -1).all()


def test_a_refill_leaves_nothing_of_the_batch_before() -> None:
    blocks = RowBlocks(LIMITS, 16, CPU)
    at = blocks.table.data_ptr()
    blocks.fill(rows((0, 300, 1)))
    blocks.fill(rows((5, 6, 3)))
    assert blocks.table.tolist() == [[3, 5, 6]] + [[-1, 0, 0]] * (len(blocks.table) - 1)
    assert blocks.table.data_ptr() == at
    blocks.fill([])
    assert (blocks.table[:, 0] == -1).all()


@pytest.mark.parametrize("block_rows", [16, 64])
def test_no_batch_has_more_blocks_than_are_launched(block_rows: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    blocks = RowBlocks(LIMITS, block_rows, CPU)
    for _ in range(500):
        num_rows = rng.randint(1, LIMITS.max_num_tokens)
        cuts = sorted(rng.sample(range(num_rows + 1), min(2 * rng.randint(1, 5), (num_rows + 1) // 2 * 2)))
        segments = list(zip(cuts[::2], cuts[1::2], range(5), strict=False))
        blocks.fill(rows(*segments))
        used = blocks.table[blocks.table[:, 0] >= 0]
        assert len(used) <= blocks.num_blocks(num_rows) <= len(blocks.table)
        assert [row for _, start, end in used.tolist() for row in range(start, end)] == [
            row for start, end, _ in segments for row in range(start, end)
        ]


def test_launches_are_as_few_as_rows() -> None:
    blocks = RowBlocks(LIMITS, 16, CPU)
    assert [blocks.num_blocks(num_rows) for num_rows in (1, 5, 6, 16, 160)] == [1, 5, 5, 6, 15]


def test_many_rows_get_larger_blocks() -> None:
    assert [block_rows_of(num_rows) for num_rows in (0, 1, 256, 257, 4096)] == [16, 16, 16, 64, 64]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 4, 0), (3, 5, 1)], "rows 3 to 5 after row 4"),
        ([(4, 4, 0)], "rows 4 to 4"),
        ([(-1, 4, 0)], "rows -1 to 4"),
        ([(299, 301, 0)], "of at most 300"),
        ([(0, 1, 5)], "of 5"),
        ([(0, 1, -1)], "of 5"),
        ([(0, 1, 2), (3, 4, 2)], "each of them once"),
    ],
)
def test_rows_that_are_not_a_batch_are_refused(segments: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowBlocks(LIMITS, 16, CPU).check(rows(*segments))
