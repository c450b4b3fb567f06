"""Every operation and a whole decoder on the GPU against the CPU's torch reference, in float32 and bfloat16; and times.

Prints the largest difference of each and exits 1 if one is over its tolerance; where there is no GPU it says so and exits 0. A run
appends one JSON line to benchmarks/results.jsonl. Times are of a Llama 8B in bfloat16: what adapters add to one layer, replayed from a
CUDA graph, and whole steps of a few of its layers. What needs triton is imported where there is a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from gpu_lora import (
    LLAMA_8B,
    PARITY_ROWS,
    PARITY_SHAPE,
    POPULARITIES,
    Batch,
    Capture,
    LayerTimes,
    Parity,
    captured,
    eager_us,
    graph_us,
    relative_difference,
    timed_batches,
)
from results import record

from loramux.kernels.ops import LoraShape, Ops
from loramux.kernels.select import select_ops

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of |gpu - cpu| / (1 + |cpu|), and of the decoder's logits by norm."""


def worst_difference(case: Callable[[Any], torch.Tensor], device: str, dtype: torch.dtype) -> float:
    from gpu_operations import Place

    expected = case(Place("cpu", dtype, True, torch.Generator().manual_seed(0)))
    return relative_difference(case(Place(device, dtype, False, torch.Generator().manual_seed(0))), expected)


def adapter_differences(parity: Parity, num_rows: Sequence[int], capture: Capture) -> dict[str, float]:
    """The largest difference of every kind of batch; infinity where the same batch does not give the same bits again."""
    worst = {f"lora-{rows}-{popularity}": parity.worst(rows, popularity) for rows, popularity in product(num_rows, POPULARITIES)}
    worst["lora-refilled-graph"] = parity.worst_after_refill(capture)
    worst["lora-repeated"] = 0.0 if all(map(parity.repeats, num_rows)) else math.inf
    return worst


def check(gpu_ops: Ops, device: str, shape: LoraShape, num_rows: Sequence[int], capture: Capture) -> dict[str, Any]:
    """The worst difference of every operation by dtype, and which of them are over the tolerance."""
    from gpu_decoder import decoder_differences
    from gpu_operations import CASES

    worst: dict[str, float] = {}
    for dtype in TOLERANCE:
        differences = {case.__name__: worst_difference(case, device, dtype) for case in CASES}
        differences |= decoder_differences(gpu_ops, device, dtype)
        differences |= adapter_differences(Parity(gpu_ops, device, replace(shape, dtype=dtype), max(*num_rows, 33)), num_rows, capture)
        worst |= {f"{name}-{str(dtype).removeprefix('torch.')}": difference for name, difference in differences.items()}
    tolerance = {str(dtype).removeprefix("torch."): limit for dtype, limit in TOLERANCE.items()}
    failed = [name for name, difference in worst.items() if not difference <= tolerance[name.rpartition("-")[2]]]
    return {"kernels": gpu_ops.name, "worst": worst, "failed": failed}


def main() -> None:
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing to check.")
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    from gpu_decoder import step_times

    ops = select_ops("cuda")
    found = check(ops, "cuda", PARITY_SHAPE, PARITY_ROWS, captured)
    layers = LayerTimes(ops, "cuda", LLAMA_8B, timed_batches())
    times = {"graph_us": layers.times(graph_us, timed_batches()), "eager_us": layers.times(eager_us, [Batch(16, 8, 16)])}
    times["step_ms"] = step_times(ops, "cuda")
    settings = {"tolerance": {str(dtype): limit for dtype, limit in TOLERANCE.items()}}
    record("gpu_check", settings, {**found, **times}, device=torch.cuda.get_device_name())
    if found["failed"]:
        sys.exit(f"over the tolerance: {', '.join(found['failed'])}")


if __name__ == "__main__":
    main()
