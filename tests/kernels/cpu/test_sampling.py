"""Every instruction set of this machine against the torch reference: the same token, whatever the instruction set and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from loramux.kernels.ops import SamplingRow
from loramux.kernels.reference.sampling import choose_tokens, row_peaks, token_logprobs
from tests.kernels.sampling_cases import random_logits, random_rows

_native = pytest.importorskip("loramux.kernels.cpu._native", reason="the native kernels are not built", exc_type=ImportError)

from loramux.kernels.cpu.ops import CpuOps  # noqa: E402

ISAS = _native.supported_isas()
VOCAB_SIZES = [1, 2, 15, 16, 31, 32, 33, 101, 255, 256, 257, 1009, 4000, 32000, 49157]


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(request.param)


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_equal_the_reference(ops: CpuOps, num_threads: int, vocab_size: int) -> None:
    seed = vocab_size * 10 + num_threads
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    logits, sampling = random_logits(generator, 60, vocab_size), random_rows(seed, 60)
    before = logits.clone()
    assert ops.choose_tokens(logits, sampling) == choose_tokens(logits, sampling)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [1, 16, 33, 4093])
def test_a_row_without_a_choice_is_told(ops: CpuOps, vocab_size: int) -> None:
    nan, inf = float("nan"), float("inf")
    for temperature in (0.0, 0.7):
        for place in {0, vocab_size // 2, vocab_size - 1}:
            logits = torch.zeros(7, vocab_size)
            logits[0, place], logits[1, place], logits[2, place] = nan, inf, -torch.tensor(nan)
            logits[3] = -inf
            logits[5] = -inf
            logits[5, place] = -1e30
            sampling = [SamplingRow(temperature, 0, 1.0, 0.0, 0.0)] * 7
            assert ops.choose_tokens(logits, sampling) == [-1, -1, -1, -1, 0, place, 0]
            assert choose_tokens(logits, sampling) == [-1, -1, -1, -1, 0, place, 0]
            peaks, expected = ops.row_peaks(logits), row_peaks(logits)
            assert torch.equal(peaks.isnan(), expected.isnan())
            assert torch.equal(peaks.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_logprobs_equal_torch(ops: CpuOps, num_threads: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_logits(generator, 11, vocab_size)
    token_ids = torch.randint(0, vocab_size, (11,), generator=generator)
    expected = logits.double().log_softmax(dim=1)
    for k in (0, 1, min(5, vocab_size), vocab_size):
        found, reference = ops.token_logprobs(logits, token_ids, k), token_logprobs(logits, token_ids, k)
        torch.testing.assert_close(found.values.double(), expected.gather(1, token_ids[:, None]).squeeze(1), atol=1e-5, rtol=1e-6)
        assert torch.equal(found.ranks, (logits > logits.gather(1, token_ids[:, None])).sum(dim=1) + 1)
        assert torch.equal(found.ranks, reference.ranks)
        assert torch.equal(found.top_ids, reference.top_ids)
        torch.testing.assert_close(found.top_values.double(), expected.gather(1, found.top_ids), atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(found.top_values, reference.top_values, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(found.values, reference.values, atol=1e-5, rtol=1e-6)


def test_arguments_are_checked(ops: CpuOps) -> None:
    logits = torch.zeros(4, 40)
    sampling = random_rows(1, 4)
    for wrong in (logits.double(), logits[:, ::2], torch.zeros(40, 4).T):
        with pytest.raises(ValueError):
            ops.choose_tokens(wrong, sampling)
        with pytest.raises(ValueError):
            ops.row_peaks(wrong)
    with pytest.raises(ValueError):
        ops.choose_tokens(logits[:3], sampling)
    with pytest.raises(ValueError):
        ops.token_logprobs(logits, torch.zeros(3, dtype=torch.int64), 1)
    for token_id in (-1, 40):
        with pytest.raises(IndexError):
            ops.token_logprobs(logits, torch.full((4,), token_id), 1)
