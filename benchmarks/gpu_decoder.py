"""A whole decoder on a GPU: against the torch reference on the CPU, recorded decode steps against queued ones, and the time of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from gpu_lora import Draw, Prepared, prepare, slot_rows

from loramux.kernels.ops import (
    AttentionBatch,
    Decoder,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
    LinearWeights,
    LoraLimits,
    LoraShape,
    LoraSlots,
    Ops,
    Quantization,
    SiteShape,
    StepLora,
)
from loramux.kernels.reference.ops import ReferenceOps
from loramux.kernels.triton.decoder import TritonDecoder
from loramux.kernels.triton.graphs import call_again

BLOCK_SIZE = 32
PARITY_SHAPE = DecoderShape(1003, 512, 1024, 8, 2, 64, None, 1e-5, torch.float32)
NUM_PARITY_LAYERS = 2
PARITY_STEPS = (((0, 100), (0, 7), (0, 1)), ((100, 101), (7, 40), (1, 2)), ((101, 102), (40, 41), (2, 3)), ((102, 103), (41, 42), (3, 4)))
"""(start, end) of each sequence's tokens: chunks, a mixed step, decodes."""

LLAMA_8B = DecoderShape(128256, 4096, 14336, 32, 8, 128, None, 1e-5, torch.bfloat16)
NUM_TIMED_LAYERS = 8
CONTEXT = 1024


class Step(NamedTuple):
    """On the CPU."""

    token_ids: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    attention: AttentionBatch
    logit_rows: torch.Tensor


def make_step(shape: DecoderShape, spans: tuple[tuple[int, int], ...]) -> Step:
    """The tokens (start, end) of each sequence; logits are asked of each one's last. Sequences have their blocks one after another."""
    num_blocks = -(-max(end for _, end in spans) // BLOCK_SIZE) + 4
    positions = torch.cat([torch.arange(*span) for span in spans])
    owners = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor([end - start for start, end in spans]))
    table = torch.arange(len(spans) * 64).view(len(spans), 64)[:, :num_blocks]
    angles = positions[:, None] / 10000 ** (torch.arange(shape.head_dim // 2) / (shape.head_dim // 2))
    ends = torch.tensor([end - start for start, end in spans]).cumsum(0).tolist()
    kv_slots = table[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = AttentionBatch((0, *ends), tuple(end for _, end in spans), table, kv_slots)
    token_ids = (positions * 31 + owners * 7) % shape.vocab_size
    return Step(token_ids, angles.cos().repeat(1, 2), angles.sin().repeat(1, 2), batch, torch.tensor(ends) - 1)


def random_weights(shape: DecoderShape, num_layers: int, device: str) -> DecoderWeights:
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator, device=device) * scale).to(shape.dtype)

    def linear(out: int, width: int) -> LinearWeights:
        return LinearWeights(tensor(out, width, scale=width**-0.5))

    def layers() -> Iterator[LayerWeights]:
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        for _ in range(num_layers):
            yield LayerWeights(
                input_norm=1 + tensor(shape.hidden_size, scale=0.1),
                qkv=linear(query + 2 * kv, shape.hidden_size),
                q_norm=None,
                k_norm=None,
                o=linear(shape.hidden_size, query),
                post_attention_norm=1 + tensor(shape.hidden_size, scale=0.1),
                gate_up=linear(2 * shape.intermediate_size, shape.hidden_size),
                down=linear(shape.hidden_size, shape.intermediate_size),
            )

    embedding = tensor(shape.vocab_size, shape.hidden_size)
    return DecoderWeights(embedding, list(layers()), 1 + tensor(shape.hidden_size, scale=0.1), linear(shape.vocab_size, shape.hidden_size))


def moved(weights: DecoderWeights, device: str) -> DecoderWeights:
    def put(value: torch.Tensor | LinearWeights | None) -> torch.Tensor | LinearWeights | None:
        return LinearWeights(value.weight.to(device)) if isinstance(value, LinearWeights) else None if value is None else value.to(device)

    layers = [LayerWeights(*map(put, layer)) for layer in weights.layers]
    return DecoderWeights(weights.embedding.to(device), layers, weights.norm.to(device), LinearWeights(weights.head.weight.to(device)))


def lora_shape(shape: DecoderShape, num_layers: int) -> LoraShape:
    query, kv, hidden, inner = (
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
        shape.hidden_size,
        shape.intermediate_size,
    )
    layer = (
        SiteShape(hidden, ((0, query), (query, query + kv), (query + kv, query + 2 * kv))),
        SiteShape(query, ((0, hidden),)),
        SiteShape(hidden, ((0, inner), (inner, 2 * inner))),
        SiteShape(inner, ((0, hidden),)),
    )
    return LoraShape((*layer * num_layers, SiteShape(hidden, ((0, shape.vocab_size),))), shape.vocab_size, hidden, shape.dtype)


def with_adapters(slots: LoraSlots, adapters: list[Prepared], step: Step) -> StepLora:
    """Every sequence but the first has an adapter of its own."""
    starts = step.attention.query_starts
    rows = slot_rows(adapters, [(starts[i + 1], starts[i + 2]) for i in range(len(adapters))])
    ends = slot_rows(adapters, [(i + 1, i + 2) for i in range(len(adapters))])
    return StepLora(slots.plan(rows), slots.plan(ends))


def logits_of(decoder: Decoder, slots: LoraSlots, shape: DecoderShape) -> torch.Tensor:
    """Of every step of `PARITY_STEPS`, with adapters."""
    draw = Draw(0, shape.dtype)
    adapters = [prepare(slots, draw.adapter(lora_shape(shape, NUM_PARITY_LAYERS), [5, 16])) for _ in range(2)]
    caches = decoder.new_kv_caches(256, BLOCK_SIZE)
    results = []
    for spans in PARITY_STEPS:
        step = make_step(shape, spans)
        lora = with_adapters(slots, adapters, step)
        results.append(decoder.forward(step.token_ids, step.cos, step.sin, caches, step.attention, lora, step.logit_rows).cpu().clone())
    return torch.cat(results)


def decoder_differences(ops: Ops, device: str, dtype: torch.dtype) -> dict[str, float]:
    """|got - want| / |want| of the logits, by norm: to the reference, in 8 bits too, and of recorded steps to queued ones."""
    shape = PARITY_SHAPE._replace(dtype=dtype)
    weights = random_weights(shape, NUM_PARITY_LAYERS, "cpu")
    on_device, limits = moved(weights, device), LoraLimits(2, 16, 256)

    def difference(quantization: Quantization | None) -> float:
        want = logits_of(
            ReferenceOps().decoder(shape, weights, quantization),
            ReferenceOps().lora_slots(lora_shape(shape, NUM_PARITY_LAYERS), limits),
            shape,
        )
        return distance(logits_of(ops.decoder(shape, on_device, quantization), slots, shape), want)

    slots = ops.lora_slots(lora_shape(shape, NUM_PARITY_LAYERS), limits)
    recorded, queued = (logits_of(TritonDecoder(shape, on_device, capture=capture), slots, shape) for capture in (None, call_again))
    return {"decoder": difference(None), "decoder-int8": difference("int8"), "decoder-graph": distance(recorded, queued)}


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def step_times(ops: Ops, device: str, shape: DecoderShape = LLAMA_8B, num_layers: int = NUM_TIMED_LAYERS) -> dict[str, float]:
    """Milliseconds of a step, from numbers on the host to logits on the device, of so many layers and the head."""
    decoder = ops.decoder(shape, random_weights(shape, num_layers, device))
    steps = {f"decode-{count}": ((CONTEXT - 1, CONTEXT),) * count for count in (16, 32)} | {"prefill-512": ((0, 512),)}
    caches = decoder.new_kv_caches(32 * 64, BLOCK_SIZE)
    return {name: _milliseconds(decoder, caches, make_step(shape, spans)) for name, spans in steps.items()}


def _milliseconds(decoder: Decoder, caches: object, step: Step, num_calls: int = 10) -> float:
    """The least of some calls, the first left out."""
    seconds = []
    for _ in range(num_calls + 1):
        start = time.perf_counter()
        logits = decoder.forward(step.token_ids, step.cos, step.sin, caches, step.attention, None, step.logit_rows)
        logits[-1, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return round(min(seconds[1:]) * 1000, 3)
