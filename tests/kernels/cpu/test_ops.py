"""Every instruction set of this machine against the torch reference. Results are selections, not sums, so they are equal bit for bit."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from loramux.kernels.reference.apply_bitmask import apply_bitmask

_native = pytest.importorskip("loramux.kernels.cpu._native", reason="the native kernels are not built", exc_type=ImportError)

from loramux.kernels.cpu.ops import CpuOps  # noqa: E402

ISAS = _native.supported_isas()
VOCAB_SIZES = [1, 2, 31, 32, 33, 61, 64, 97, 127, 1009, 4093, 32000, 49152, 49157]


def random_case(seed: int, num_rows: int, num_masks: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, a bitmask whose words are one third each random, all allowed and none allowed, and distinct rows in random order."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    words = (num_masks, (vocab_size + 31) // 32)
    bitmask = torch.randint(-(2**31), 2**31, words, dtype=torch.int64, generator=generator)
    kind = torch.randint(0, 3, words, generator=generator)
    bitmask = bitmask.masked_fill(kind == 1, -1).masked_fill(kind == 2, 0).to(torch.int32)
    return torch.randn(num_rows, vocab_size, generator=generator), bitmask, torch.randperm(num_rows, generator=generator)[:num_masks]


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(request.param)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize(("num_rows", "num_masks"), [(1, 1), (7, 7), (13, 5)])
def test_apply_bitmask_equals_the_reference(ops: CpuOps, num_rows: int, num_masks: int, vocab_size: int) -> None:
    logits, bitmask, rows = random_case(vocab_size * 100 + num_rows, num_rows, num_masks, vocab_size)
    expected = logits.clone()
    apply_bitmask(expected, bitmask, rows)
    ops.apply_bitmask(logits, bitmask, rows)
    assert torch.equal(logits, expected)


def test_apply_bitmask_leaves_allowed_nan_and_infinity_alone(ops: CpuOps) -> None:
    logits = torch.tensor([[float("nan"), float("inf"), -0.0, float("nan")] * 16])
    ops.apply_bitmask(logits, torch.tensor([[0b0111, -1]], dtype=torch.int32), torch.tensor([0]))
    assert torch.isnan(logits[0, 0])
    assert logits[0, 1] == float("inf")
    assert torch.signbit(logits[0, 2])
    assert torch.equal(logits[0, 3:32], torch.full((29,), -float("inf")))
    assert torch.isnan(logits[0, 32])


def test_apply_bitmask_writes_only_its_rows(ops: CpuOps) -> None:
    padded = torch.zeros(5, 67)
    ops.apply_bitmask(padded[1:4], torch.zeros(1, 3, dtype=torch.int32), torch.tensor([1]))
    assert torch.equal(padded[2], torch.full((67,), -float("inf")))
    assert padded[[0, 1, 3, 4]].count_nonzero() == 0


def test_apply_bitmask_of_no_rows_does_nothing(ops: CpuOps) -> None:
    logits = torch.zeros(3, 40)
    ops.apply_bitmask(logits, torch.empty(0, 2, dtype=torch.int32), torch.empty(0, dtype=torch.int64))
    assert logits.count_nonzero() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4, 70, dtype=torch.bfloat16)}, "logits must be"),
        ({"logits": torch.zeros(70, 4).t()}, "logits must be"),
        ({"logits": torch.zeros(70)}, "logits must be"),
        ({"bitmask": torch.zeros(2, 3, dtype=torch.int64)}, "bitmask must be"),
        ({"bitmask": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]}, "bitmask must be"),
        ({"bitmask": torch.zeros(2, 2, dtype=torch.int32)}, "does not fit"),
        ({"bitmask": torch.zeros(3, 3, dtype=torch.int32)}, "does not fit"),
        ({"rows": torch.tensor([0, 1], dtype=torch.int32)}, "rows must be"),
        ({"rows": torch.tensor([[0, 1]])}, "rows must be"),
        ({"rows": torch.zeros(2, dtype=torch.int64, device="meta")}, "rows must be"),
    ],
)
def test_apply_bitmask_refuses_what_it_was_not_built_for(ops: CpuOps, change: dict[str, torch.Tensor], message: str) -> None:
    good = {"logits": torch.zeros(4, 70), "bitmask": torch.zeros(2, 3, dtype=torch.int32), "rows": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=message):
        ops.apply_bitmask(**(good | change))


@pytest.mark.parametrize("row", [-1, 4])
def test_apply_bitmask_refuses_a_row_out_of_range_before_writing(ops: CpuOps, row: int) -> None:
    logits = torch.zeros(4, 70)
    with pytest.raises(IndexError, match=f"row {row} of 4"):
        ops.apply_bitmask(logits, torch.zeros(2, 3, dtype=torch.int32), torch.tensor([0, row]))
    assert logits.count_nonzero() == 0


def test_apply_bitmask_releases_the_interpreter_lock(ops: CpuOps) -> None:
    """Another thread's clock ticks while one long call runs: with the lock held it could not tick at all."""
    num_masks, vocab_size = 64, 262144
    logits, rows = torch.zeros(num_masks, vocab_size), torch.arange(num_masks)
    bitmask = torch.zeros(num_masks, vocab_size // 32, dtype=torch.int32)
    rows = rows.repeat(8)
    bitmask = bitmask.repeat(8, 1)
    span: list[float] = []

    def call() -> None:
        start = time.perf_counter()
        ops.apply_bitmask(logits, bitmask, rows)
        span.extend((start, time.perf_counter()))

    ticks: list[float] = []
    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.0005)
    thread.join()
    start, end = span
    assert any(start + 0.001 < tick < end - 0.001 for tick in ticks), f"{len(ticks)} ticks, a call of {end - start:.4f} s"


def test_the_fastest_instruction_set_is_the_default() -> None:
    assert ISAS[0] is _native.Isa.SCALAR
    assert CpuOps().isa is ISAS[-1]
    assert CpuOps().name == f"cpu-{ISAS[-1].name.lower()}"


def test_an_instruction_set_of_another_machine_is_refused() -> None:
    for isa in set(_native.Isa) - set(ISAS):
        with pytest.raises(ValueError, match=isa.name):
            CpuOps(isa)
        with pytest.raises(ValueError, match="does not run"):
            _native.apply_bitmask(0, 0, 0, 0, 0, 0, isa)
