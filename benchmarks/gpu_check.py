"""Every operation on the GPU against the CPU's torch reference, in float32 and bfloat16.

Prints the largest difference of each and exits 1 if one is over its tolerance; where there is no GPU it says so and exits 0. A run
appends one JSON line to benchmarks/results.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from results import record

from loramux.kernels.ops import AttentionBatch, LoraTerm, Ops, SliceWeights
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


def lora(ops: Ops, place: Place) -> torch.Tensor:
    """Two adapters of different rank on a fused layer of two slices; the rows between them have none."""
    y, x = place.randn(NUM_TOKENS, 2 * HIDDEN), place.randn(NUM_TOKENS, HIDDEN)
    terms = []
    for start, end, rank in ((0, 3, 8), (20, NUM_TOKENS, 16)):
        halves = [(i * rank, (i + 1) * rank, i * HIDDEN, (i + 1) * HIDDEN) for i in range(2)]
        slices = tuple(SliceWeights(*half, place.randn(HIDDEN, rank, scale=0.05)) for half in halves)
        terms.append(LoraTerm(start, end, place.randn(2 * rank, HIDDEN, scale=0.05), slices))
    ops.lora(y, x, terms)
    return y


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
    lora,
    apply_bitmask,
)


def worst_difference(case: Callable[[Ops, Place], torch.Tensor], gpu_ops: Ops, device: str, dtype: torch.dtype) -> float:
    """The largest |gpu - cpu| / (1 + |cpu|)."""
    expected = case(ReferenceOps(), Place("cpu", dtype, torch.Generator().manual_seed(0))).double()
    got = case(gpu_ops, Place(device, dtype, torch.Generator().manual_seed(0))).cpu().double()
    return float(((got - expected).abs() / (1 + expected.abs())).max())


def check(device: str) -> dict[str, Any]:
    """The worst difference of every operation by dtype, and which of them are over the tolerance."""
    gpu_ops = select_ops(device)
    worst, failed = {}, []
    for case, dtype in product(CASES, TOLERANCE):
        name = f"{case.__name__}-{str(dtype).removeprefix('torch.')}"
        worst[name] = worst_difference(case, gpu_ops, device, dtype)
        if not worst[name] <= TOLERANCE[dtype]:
            failed.append(name)
    return {"kernels": gpu_ops.name, "worst": worst, "failed": failed}


def main() -> None:
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing to check.")
        return
    found = check("cuda")
    record(
        "gpu_check", {"tolerance": {str(dtype): limit for dtype, limit in TOLERANCE.items()}}, found, device=torch.cuda.get_device_name()
    )
    if found["failed"]:
        sys.exit(f"over the tolerance: {', '.join(found['failed'])}")


if __name__ == "__main__":
    main()
