"""The same token as the torch reference, for every way to draw one."""

from __future__ import annotations

import pytest
import torch

from loramux.kernels.ops import SamplingRow
from loramux.kernels.reference.sampling import choose_tokens as reference
from loramux.kernels.triton.ops import TritonOps
from loramux.kernels.triton.sampling import BLOCK_TOKENS
from tests.kernels.sampling_cases import random_logits, random_rows

OPS = TritonOps("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.mark.parametrize("vocab_size", [1, 2, 33, 1009, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS + 77])
def test_tokens_equal_the_reference(vocab_size: int) -> None:
    print(f"seed {vocab_size}")
    logits = random_logits(torch.Generator().manual_seed(vocab_size), 25, vocab_size)
    sampling, before = random_rows(vocab_size, 25), logits.clone()
    assert OPS.choose_tokens(logits, sampling) == reference(logits, sampling)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("top_k", [0, 1, 3, 39, 40])
def test_equals_at_an_edge_are_all_kept(top_k: int, top_p: float) -> None:
    """Zeros of both signs are equal."""
    logits = torch.tensor([-1.0, 0.0, -0.0, 2.0]).repeat_interleave(10)[torch.randperm(40)].repeat(8, 1)
    sampling = [SamplingRow(1.3, top_k, top_p, 0.0, (index + 0.5) / 8) for index in range(8)]
    assert OPS.choose_tokens(logits, sampling) == reference(logits, sampling)


@pytest.mark.parametrize("vocab_size", [1, 33])
def test_a_row_without_a_choice_is_told(vocab_size: int) -> None:
    nan, inf = float("nan"), float("inf")
    for temperature in (0.0, 0.7):
        logits = torch.zeros(6, vocab_size)
        logits[0, -1], logits[1, 0] = nan, inf
        logits[2] = logits[3] = -inf
        logits[3, -1] = -1e30
        logits[4] = nan
        sampling = [SamplingRow(temperature, 2, 0.5, 0.0, 0.0)] * 6
        assert OPS.choose_tokens(logits, sampling) == [-1, -1, -1, vocab_size - 1, -1, 0]


def test_the_first_of_the_most_likely_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-0.0, 0.0, -1.0, 0.0]])
    assert OPS.choose_tokens(logits, [SamplingRow(0.0, 0, 1.0, 0.0, 0.0)] * 2) == [1, 0]
