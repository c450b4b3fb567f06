"""Packed products against their equation in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_native = pytest.importorskip("loramux.kernels.cpu._native", reason="the native kernels are not built", exc_type=ImportError)

from loramux.kernels.cpu.matmul import PackedWeight, matmul  # noqa: E402
from loramux.kernels.reference.quantization import quantize  # noqa: E402

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=_native.supported_isas(), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("size", [(1, 1), (61, 97), (16, 32), (130, 576), (83, 1000)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 17, 33, 64, 131])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_products_equal_their_equation(isa: Any, dtype: torch.dtype, num_rows: int, size: tuple[int, int]) -> None:
    out_features, in_features = size
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    x, bias = torch.randn(num_rows, in_features).to(dtype), torch.randn(out_features).to(dtype)
    want = x.double() @ weight.double().T
    packed = PackedWeight.pack(weight)
    for y_dtype in {dtype, torch.float32}:
        tolerance = 1e-5 if y_dtype == torch.float32 else TOLERANCES[dtype]
        torch.testing.assert_close(matmul(x, packed, None, y_dtype, isa).double(), want, atol=tolerance, rtol=tolerance)
        with_bias = matmul(x, packed, bias, y_dtype, isa)
        torch.testing.assert_close(with_bias.double(), want + bias.double(), atol=tolerance, rtol=tolerance)
        assert with_bias.dtype == y_dtype


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_row_does_not_depend_on_its_companions(isa: Any, dtype: torch.dtype) -> None:
    if isa == _native.Isa.AMX and dtype == torch.bfloat16:
        pytest.skip("tiles sum in the order of their rows' number")
    packed, x = PackedWeight.pack(torch.randn(83, 300).to(dtype)), torch.randn(67, 300).to(dtype)
    together = matmul(x, packed, None, torch.float32, isa)
    alone = torch.cat([matmul(row[None], packed, None, torch.float32, isa) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("num_rows", [1, 3, 17, 67])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_products_of_8_bits_equal_their_equation(isa: Any, dtype: torch.dtype, num_rows: int) -> None:
    weight = (torch.randn(83, 300) / 300**0.5).to(dtype)
    weight[7] = 0
    x, bias = torch.randn(num_rows, 300).to(dtype), torch.randn(83).to(dtype)
    values, scales = quantize(weight)
    want = x.double() @ (values * scales.double()[:, None]).T + bias.double()
    got = matmul(x, PackedWeight.quantize(weight), bias, torch.float32, isa)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_8_bits_come_back_as_the_reference_rounds(dtype: torch.dtype) -> None:
    weight = torch.randn(61, 97).to(dtype)
    weight[3] = 0
    unpacked = PackedWeight.quantize(weight).unpack()
    assert torch.equal(unpacked, quantize(weight).dequantize(dtype))
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert ((unpacked.float() - weight.float()).abs() <= step * 0.51 + unpacked.float().abs() * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_weight_comes_back_as_it_was(dtype: torch.dtype) -> None:
    weight = torch.randn(61, 97).to(dtype)
    assert torch.equal(PackedWeight.pack(weight).unpack(), weight)


def test_what_does_not_fit_is_refused() -> None:
    weight, isa = torch.randn(5, 7), _native.supported_isas()[-1]
    packed = PackedWeight.pack(weight)
    with pytest.raises(ValueError, match="shape"):
        matmul(torch.randn(2, 8), packed, None, torch.float32, isa)
    with pytest.raises(ValueError, match="bfloat16"):
        matmul(torch.randn(2, 7).bfloat16(), packed, None, torch.float32, isa)
    with pytest.raises(ValueError, match="bfloat16"):
        matmul(torch.randn(2, 7), packed, None, torch.bfloat16, isa)
    with pytest.raises(ValueError, match="shape"):
        matmul(torch.randn(2, 7), packed, torch.randn(7), torch.float32, isa)
    with pytest.raises(ValueError, match="strided"):
        PackedWeight.pack(weight.T)
