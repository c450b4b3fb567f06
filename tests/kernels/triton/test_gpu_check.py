"""What `make gpu-check` does, as far as a CPU and the interpreter go: the harness, not the GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from loramux.kernels.ops import LoraShape, SiteShape
from loramux.kernels.triton.ops import TritonOps

SHAPE = LoraShape((SiteShape(37, ((0, 20), (20, 61))),), 31, 17, torch.float32)
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


class Wrong(TritonOps):
    """One operation is off by more than any tolerance."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(gate_up) * 1.2


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_check

    return gpu_check


def test_the_interpreted_kernels_pass(gpu_check: ModuleType) -> None:
    found = gpu_check.check(TritonOps("cpu"), "cpu", SHAPE, (3,), lambda call: call)
    assert found["failed"] == []
    assert found["worst"]["linear-float32"] == 0
    assert {"lora-3-distinct-bfloat16", "lora-refilled-graph-float32", "lora-repeated-bfloat16"} <= found["worst"].keys()


def test_a_wrong_operation_is_named(gpu_check: ModuleType) -> None:
    worst = gpu_check.worst_difference(gpu_check.silu_mul, Wrong("cpu"), "cpu", torch.float32)
    assert worst > gpu_check.TOLERANCE[torch.float32]
    assert gpu_check.relative_difference(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_times_are_of_one_layer_and_what_adapters_add(gpu_check: ModuleType) -> None:
    calls = []

    def measure(call: object) -> float:
        calls.append(call)
        return 100.0 + 8 * len(calls)

    batches = [gpu_check.Batch(2, 1, 8), gpu_check.Batch(2, 2, 8)]
    layers = gpu_check.LayerTimes(TritonOps("cpu"), "cpu", {"o": SiteShape(16, ((0, 8),))}, batches)
    assert layers.times(measure, batches) == {"o-2": {"base": 27.0, "1x8": 2.0, "2x8": 4.0}}


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py")], env={"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "There is no GPU here: nothing to check.\n")
