"""Every implementation of low-rank updates against the equation in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from loramux.kernels.ops import LoraLimits, LoraShape, LoraSlots, Ops
from loramux.kernels.reference.ops import ReferenceOps
from tests.kernels.lora_cases import POPULARITIES, Draw, LoraCase, assert_as_expected, expected_at_site, expected_embeddings, plan


def _implementations() -> dict[str, Callable[[], Ops]]:
    try:
        from loramux.kernels.cpu import _native
        from loramux.kernels.cpu.ops import CpuOps
    except ImportError:
        return {"reference": ReferenceOps}
    return {"reference": ReferenceOps} | {isa.name.lower(): functools.partial(CpuOps, isa) for isa in _native.supported_isas()}


IMPLEMENTATIONS = _implementations()
LIMITS = LoraLimits(num_slots=300, max_rank=128, max_num_tokens=300)
DTYPES = [torch.float32, torch.bfloat16]
FEW_ROWS = [1, 2, 3, 7, 16, 17, 64, 131, 257]
MANY_ROWS = [*range(1, 65), 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 128, 129, 191, 193, 223, 251, 256, 257]


def make_slots(name: str, shape: LoraShape) -> LoraSlots:
    return IMPLEMENTATIONS[name]().lora_slots(shape, LIMITS)


def check(name: str, case: LoraCase, draw: Draw) -> None:
    made = plan(make_slots(name, case.shape), case)
    for site, shape in enumerate(case.shape.sites):
        x = draw.matrix(case.num_rows, shape.in_features)
        y = draw.matrix(case.num_rows, shape.slices[-1][1])
        want = expected_at_site(case, site, y, x)
        made.apply(site, y, x)
        assert_as_expected(y, want)
    y, token_ids = draw.matrix(case.num_rows, case.shape.hidden_size), draw.tokens(case.num_rows)
    want = expected_embeddings(case, y, token_ids)
    made.embed(y, token_ids)
    assert_as_expected(y, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_rows", FEW_ROWS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_updates_are_the_equation(name: str, num_rows: int, popularity: str, dtype: torch.dtype) -> None:
    draw = Draw(num_rows, dtype)
    check(name, draw.case(num_rows, popularity), draw)
