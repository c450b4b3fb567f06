from __future__ import annotations

import pytest
import torch

from loramux.kernels.ops import AttentionBatch
from loramux.kernels.triton.paged_attention import HeadShape
from loramux.kernels.triton.pieces import Cutter, HostPieces

NO_TENSOR = torch.zeros(0, dtype=torch.int64)


def batch(*sequences: tuple[int, int]) -> AttentionBatch:
    """Of (context, queries)."""
    starts = [0]
    for _, queries in sequences:
        starts.append(starts[-1] + queries)
    return AttentionBatch(tuple(starts), tuple(context for context, _ in sequences), NO_TENSOR, NO_TENSOR)


def test_decodes_and_chunks_are_cut_apart() -> None:
    cutter = Cutter(HeadShape(12, 3, 64), block_keys=64, num_programs=12)
    decodes, chunks = cutter.cut(batch((100, 1), (50, 40), (7, 1)), [1, 9, 20])
    assert decodes == HostPieces([(0, 1, 99, 1), (41, 1, 6, 20)], 1, 2)
    assert chunks == HostPieces([(1, 16, 10, 9), (17, 16, 26, 9), (33, 8, 42, 9)], 16, 1)


def test_a_batch_of_one_kind_is_one_group() -> None:
    cutter = Cutter(HeadShape(4, 4, 64), 64, 1)
    assert cutter.cut(batch((3, 1), (4, 1)), [1, 2]) == (HostPieces([(0, 1, 2, 1), (1, 1, 3, 2)], 1, 1),)
    assert cutter.cut(batch((3, 3)), [1]) == (HostPieces([(0, 3, 0, 1)], 64, 1),)


@pytest.mark.parametrize(
    ("num_pieces", "longest", "num_splits"),
    [(1, 10**6, 32), (16, 10**6, 2), (11, 10**6, 4), (32, 10**6, 1), (1000, 10**6, 1), (1, 64, 1), (1, 65, 2), (1, 200, 4)],
)
def test_keys_are_split_so_that_few_pieces_fill_the_device(num_pieces: int, longest: int, num_splits: int) -> None:
    assert Cutter(HeadShape(32, 8, 128), block_keys=64, num_programs=396).num_splits(num_pieces, longest) == num_splits
