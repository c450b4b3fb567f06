from __future__ import annotations

import pytest
import torch

from loramux.kernels.reference.rms_norm import rms_norm
from loramux.kernels.triton.add_rms_norm import add_rms_norm, add_rms_norm_rows

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""Two units in the last place; the interpreter cuts float32 off to bfloat16, where a GPU rounds it."""
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@DTYPES
@pytest.mark.parametrize("width", [1, 16, 37, 128, 576])
def test_the_sum_is_kept_and_normalised(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    residual, delta = (torch.randn(5, width, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=generator).to(dtype)
    added = residual + delta
    y = add_rms_norm(residual, delta, weight, 1e-5)
    torch.testing.assert_close(residual, added, rtol=TOLERANCE[dtype], atol=0)
    torch.testing.assert_close(y, rms_norm(residual, weight, 1e-5), rtol=TOLERANCE[dtype], atol=1e-7)


def test_with_nothing_to_add_the_residual_is_left_alone() -> None:
    residual, weight = torch.randn(3, 40), torch.randn(40)
    before = residual.clone()
    torch.testing.assert_close(add_rms_norm(residual, None, weight, 1e-6), rms_norm(before, weight, 1e-6))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("has_delta", [False, True])
def test_some_rows_are_normalised_and_nothing_is_changed(has_delta: bool) -> None:
    residual, weight = torch.randn(6, 40), torch.randn(40)
    delta = torch.randn(6, 40) if has_delta else None
    before, rows = residual.clone(), torch.tensor([4, 0, 5], dtype=torch.int32)
    whole = residual if delta is None else residual + delta
    torch.testing.assert_close(add_rms_norm_rows(residual, delta, rows, weight, 1e-5), rms_norm(whole[rows], weight, 1e-5))
    assert torch.equal(residual, before)


def test_no_rows_are_no_launch() -> None:
    assert add_rms_norm_rows(torch.randn(2, 8), None, torch.zeros(0, dtype=torch.int32), torch.ones(8), 1e-5).shape == (0, 8)
