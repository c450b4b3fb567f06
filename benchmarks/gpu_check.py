"""Every operation on the GPU against the CPU's torch reference, in float32 and bfloat16; and what adapters add to a layer's time.

Prints the largest difference of each and exits 1 if one is over its tolerance; where there is no GPU it says so and exits 0. A run
appends one JSON line to benchmarks/results.jsonl. Times are those of one layer of a Llama 8B in bfloat16, replayed from a CUDA graph.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

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

from loramux.kernels.ops import AttentionBatch, LoraShape, Ops
from loramux.kernels.reference.ops import ReferenceOps
from loramux.kernels.select import select_ops

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of |gpu - cpu| / (1 + |cpu|)."""

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 576, 9, 3, 64, 32
CONTEXTS, QUERIES = (1, 33, 97, 131), (1, 1, 17, 131)
NUM_TOKENS = sum(QUERIES)


class Place(NamedTuple):
    """Where a case runs. Its tensors are drawn on the CPU in float32, so that every place sees the same ones."""

    device: str
    dtype: torch.dtype
    generator: torch.Generator

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=self.generator)).to(self.device, self.dtype)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


def linear(ops: Ops, place: Place) -> torch.Tensor:
    return ops.linear(place.randn(NUM_TOKENS, HIDDEN), place.randn(3 * HIDDEN, HIDDEN, scale=HIDDEN**-0.5), place.randn(3 * HIDDEN))


def rms_norm(ops: Ops, place: Place) -> torch.Tensor:
    return ops.rms_norm(place.randn(NUM_TOKENS, HIDDEN), place.randn(HIDDEN), 1e-5)


def silu_mul(ops: Ops, place: Place) -> torch.Tensor:
    return ops.silu_mul(place.randn(NUM_TOKENS, 2 * 1536))


def rope(ops: Ops, place: Place) -> torch.Tensor:
    angles = torch.rand(NUM_TOKENS, HEAD_DIM // 2, generator=place.generator).repeat(1, 2) * 100
    return ops.rope(place.randn(NUM_TOKENS, HEADS, HEAD_DIM), place.put(angles.cos()), place.put(angles.sin()))


def attention(ops: Ops, place: Place, window: int | None = None) -> torch.Tensor:
    """Writes this step's keys and values into caches that hold the tokens before them, then attends."""
    max_blocks = -(-max(CONTEXTS) // BLOCK_SIZE)
    blocks = torch.randperm(len(CONTEXTS) * max_blocks, generator=place.generator).view(len(CONTEXTS), max_blocks)
    positions = [torch.arange(context - query, context) for context, query in zip(CONTEXTS, QUERIES, strict=True)]
    slots = [blocks[s][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for s, at in enumerate(positions)]
    starts = (0, *torch.tensor(QUERIES).cumsum(0).tolist())
    batch = AttentionBatch(starts, CONTEXTS, place.put(blocks), place.put(torch.cat(slots)))
    k_cache, v_cache = (place.randn(blocks.numel(), BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2))
    k, v = (place.randn(NUM_TOKENS, KV_HEADS, HEAD_DIM) for _ in range(2))
    ops.write_kv(k, v, k_cache, v_cache, batch.kv_slots)
    return ops.paged_attention(place.randn(NUM_TOKENS, HEADS, HEAD_DIM), k_cache, v_cache, batch, HEAD_DIM**-0.5, window)


def windowed_attention(ops: Ops, place: Place) -> torch.Tensor:
    return attention(ops, place, window=41)


def apply_bitmask(ops: Ops, place: Place) -> torch.Tensor:
    """-inf becomes 1e4, so that differences are finite."""
    vocab_size = 49157
    logits = torch.randn(7, vocab_size, generator=place.generator)
    bitmask = torch.randint(-(2**31), 2**31, (5, -(-vocab_size // 32)), generator=place.generator).to(torch.int32)
    logits, rows = place.put(logits), place.put(torch.tensor([6, 0, 3, 2, 5]))
    ops.apply_bitmask(logits, place.put(bitmask), rows)
    return logits.masked_fill(logits.isinf(), 1e4)


CASES: tuple[Callable[[Ops, Place], torch.Tensor], ...] = (
    linear,
    rms_norm,
    silu_mul,
    rope,
    attention,
    windowed_attention,
    apply_bitmask,
)


def worst_difference(case: Callable[[Ops, Place], torch.Tensor], gpu_ops: Ops, device: str, dtype: torch.dtype) -> float:
    expected = case(ReferenceOps(), Place("cpu", dtype, torch.Generator().manual_seed(0)))
    return relative_difference(case(gpu_ops, Place(device, dtype, torch.Generator().manual_seed(0))), expected)


def adapter_differences(parity: Parity, num_rows: Sequence[int], capture: Capture) -> dict[str, float]:
    """The largest difference of every kind of batch; infinity where the same batch does not give the same bits again."""
    worst = {f"lora-{rows}-{popularity}": parity.worst(rows, popularity) for rows, popularity in product(num_rows, POPULARITIES)}
    worst["lora-refilled-graph"] = parity.worst_after_refill(capture)
    worst["lora-repeated"] = 0.0 if all(map(parity.repeats, num_rows)) else math.inf
    return worst


def check(gpu_ops: Ops, device: str, shape: LoraShape, num_rows: Sequence[int], capture: Capture) -> dict[str, Any]:
    """The worst difference of every operation by dtype, and which of them are over the tolerance."""
    worst: dict[str, float] = {}
    for dtype in TOLERANCE:
        differences = {case.__name__: worst_difference(case, gpu_ops, device, dtype) for case in CASES}
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
    ops = select_ops("cuda")
    found = check(ops, "cuda", PARITY_SHAPE, PARITY_ROWS, captured)
    layers = LayerTimes(ops, "cuda", LLAMA_8B, timed_batches())
    times = {"graph_us": layers.times(graph_us, timed_batches()), "eager_us": layers.times(eager_us, [Batch(16, 8, 16)])}
    settings = {"tolerance": {str(dtype): limit for dtype, limit in TOLERANCE.items()}}
    record("gpu_check", settings, {**found, **times}, device=torch.cuda.get_device_name())
    if found["failed"]:
        sys.exit(f"over the tolerance: {', '.join(found['failed'])}")


if __name__ == "__main__":
    main()
