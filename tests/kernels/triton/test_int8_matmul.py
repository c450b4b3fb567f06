from __future__ import annotations

import pytest
import torch

from loramux.kernels.reference.quantization import quantize
from loramux.kernels.triton.int8_matmul import MAX_ROWS, int8_linear

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", [1, 17, MAX_ROWS, MAX_ROWS + 1])
def test_it_equals_the_product_with_the_widened_weight(num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 200, generator=generator).to(dtype)
    weight = quantize(torch.randn(77, 200, generator=generator) * 200**-0.5)
    weight.scales[3] = 0
    bias = torch.randn(77, generator=generator).to(dtype) if has_bias else None
    want = x.double() @ weight.dequantize(torch.float64).t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(int8_linear(x, weight, bias).double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_no_rows_are_no_launch() -> None:
    assert int8_linear(torch.zeros(0, 8), quantize(torch.ones(3, 8)), None).shape == (0, 3)
