from __future__ import annotations

import pytest
import torch

from loramux.kernels.reference.silu_mul import silu_mul as reference
from loramux.kernels.triton.silu_mul import BLOCK_COLUMNS, silu_mul

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 37, BLOCK_COLUMNS, BLOCK_COLUMNS + 5])
def test_it_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(width)).mul(4).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = -200, 200
    torch.testing.assert_close(silu_mul(gate_up), reference(gate_up), rtol=TOLERANCE[dtype], atol=1e-6)


def test_no_rows_are_no_launch() -> None:
    assert silu_mul(torch.zeros(0, 6)).shape == (0, 3)
