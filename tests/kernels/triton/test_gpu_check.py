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


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_check

    return gpu_check


@pytest.fixture
def few(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the interpreter gets through."""
    import gpu_decoder
    import gpu_operations

    sizes = {"CONTEXTS": (70, 33, 9), "QUERIES": (1, 9, 9), "NUM_TOKENS": 19, "VOCAB_SIZE": 997, "HIDDEN": 48, "NUM_DRAWS": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(gpu_operations, name, size)
    shape = gpu_decoder.PARITY_SHAPE._replace(vocab_size=53, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=16)
    monkeypatch.setattr(gpu_decoder, "NUM_PARITY_LAYERS", 1)
    monkeypatch.setattr(gpu_decoder, "PARITY_SHAPE", shape)
    monkeypatch.setattr(gpu_decoder, "PARITY_STEPS", (((0, 5), (0, 1), (0, 1)), ((5, 6), (1, 2), (1, 2))))
    monkeypatch.setattr(gpu_decoder, "CONTEXT", 40)


@pytest.mark.usefixtures("few")
def test_the_interpreted_kernels_pass(gpu_check: ModuleType) -> None:
    found = gpu_check.check(TritonOps("cpu"), "cpu", SHAPE, (3,), lambda call: call)
    assert found["failed"] == []
    assert found["worst"]["choose_tokens-float32"] == found["worst"]["decoder-graph-bfloat16"] == 0
    assert {"lora-3-distinct-bfloat16", "lora-refilled-graph-float32", "lora-repeated-bfloat16"} <= found["worst"].keys()


@pytest.mark.usefixtures("few")
def test_a_wrong_operation_is_named(gpu_check: ModuleType) -> None:
    from gpu_operations import Place, silu_mul

    def wrong(place: Place) -> torch.Tensor:
        return silu_mul(place) * (1 if place.is_reference else 1.2)

    assert gpu_check.worst_difference(wrong, "cpu", torch.float32) > gpu_check.TOLERANCE[torch.float32]
    assert gpu_check.relative_difference(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


@pytest.mark.usefixtures("few")
def test_steps_are_timed(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_decoder

    monkeypatch.setattr(gpu_decoder, "_milliseconds", lambda decoder, caches, step: len(step.token_ids))
    times = gpu_decoder.step_times(TritonOps("cpu"), "cpu", gpu_decoder.PARITY_SHAPE, 1)
    assert times == {"decode-16": 16, "decode-32": 32, "prefill-512": 512}


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
