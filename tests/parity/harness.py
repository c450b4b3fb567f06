"""Runs a decoder without a scheduler: every sequence has its own blocks, handed out in order.

A sequence may carry an adapter; a batch may mix sequences with and without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from loramux.engine.checkpoint import open_checkpoint
from loramux.engine.model.decoder import DecoderModel
from loramux.engine.model.load import load_model
from loramux.kernels.ops import AttentionBatch, LoraLimits, LoraSlots, Ops, StepLora
from loramux.kernels.select import select_ops
from loramux.lora.batch import picked_rows, slot_rows
from loramux.lora.types import HostAdapter, LoraSegment

BLOCK_SIZE = 32


@dataclass
class TestSequence:
    __test__ = False

    blocks: list[int]
    adapter: HostAdapter | None = None
    num_done: int = 0
    """Tokens whose keys and values are in the blocks."""
    tokens: list[int] = field(default_factory=list)


class Run(NamedTuple):
    """The next `num_tokens` of a sequence's tokens, in one forward pass."""

    sequence: TestSequence
    num_tokens: int


class Harness:
    """A model and its KV caches. Blocks are never given back."""

    def __init__(self, model: DecoderModel, num_blocks: int = 256) -> None:
        self.model = model
        self.slots = lora_slots(model)
        self._kv = model.new_kv_caches(num_blocks, BLOCK_SIZE)
        self._free = list(range(num_blocks))

    def sequence(self, tokens: Sequence[int], max_tokens: int, adapter: HostAdapter | None = None) -> TestSequence:
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        blocks, self._free = self._free[:num_blocks], self._free[num_blocks:]
        if len(blocks) < num_blocks:
            raise AssertionError("the harness has too few blocks")
        return TestSequence(blocks, adapter, tokens=list(tokens))

    def step(self, runs: Iterable[Run], *, all_rows: bool = False) -> list[torch.Tensor]:
        """One forward over all runs. Per run the logits [num_tokens, V] of all its rows, or [1, V] of the last."""
        runs = list(runs)
        starts = [0]
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments: list[LoraSegment] = []
        tables = torch.zeros(len(runs), max(len(run.sequence.blocks) for run in runs), dtype=torch.int64)
        for row, (sequence, num_tokens) in enumerate(runs):
            span = range(sequence.num_done, sequence.num_done + num_tokens)
            token_ids += sequence.tokens[span.start : span.stop]
            positions += span
            slots += [sequence.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in span]
            tables[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
            if sequence.adapter is not None:
                segments.append(LoraSegment(starts[-1], starts[-1] + num_tokens, row, (), sequence.adapter))
            starts.append(starts[-1] + num_tokens)
            sequence.num_done = span.stop
        batch = AttentionBatch(tuple(starts), tuple(run.sequence.num_done for run in runs), tables, torch.tensor(slots))
        rows = list(range(starts[-1])) if all_rows else [end - 1 for end in starts[1:]]
        logits = self.model.forward(
            torch.tensor(token_ids),
            torch.tensor(positions),
            self._kv,
            batch,
            self._lora(segments, rows),
            torch.tensor(rows),
        )
        return list(logits.clone().split([run.num_tokens if all_rows else 1 for run in runs]))

    def _lora(self, segments: list[LoraSegment], logit_rows: list[int]) -> StepLora | None:
        rows = slot_rows(segments)
        return StepLora(self.slots.plan(rows), self.slots.plan(picked_rows(rows, logit_rows))) if rows else None


def open_model(model: Path, cache_dir: Path, dtype: str = "float32", ops: Ops | None = None) -> DecoderModel:
    return load_model(open_checkpoint(str(model), cache_dir), "cpu", dtype, ops or select_ops("cpu"))


def lora_slots(model: DecoderModel) -> LoraSlots:
    return select_ops("cpu").lora_slots(model.lora_shape, LoraLimits(num_slots=8, max_rank=128, max_num_tokens=512))


def logits(
    model: DecoderModel, prompts: Sequence[Sequence[int]], *, chunk: int | None = None, lora: Sequence[HostAdapter | None] | None = None
) -> list[torch.Tensor]:
    """Logits [len(prompt), V] at every position of each prompt, all prompts in one batch, at once or `chunk` tokens a step."""
    harness = Harness(model, num_blocks=sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts))
    adapters = lora or [None] * len(prompts)
    sequences = [harness.sequence(prompt, len(prompt), adapter) for prompt, adapter in zip(prompts, adapters, strict=True)]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    while True:
        left = [len(sequence.tokens) - sequence.num_done for sequence in sequences]
        due = [index for index, num in enumerate(left) if num]
        if not due:
            return [torch.cat(parts) for parts in found]
        runs = [Run(sequences[index], min(left[index], chunk or left[index])) for index in due]
        for index, part in zip(due, harness.step(runs, all_rows=True), strict=True):
            found[index].append(part)


class Greedy(NamedTuple):
    token_ids: list[int]
    margins: list[float]
    """The first logit less the second, at each token."""


def greedy(
    model: DecoderModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, lora: Sequence[HostAdapter | None] | None = None
) -> list[Greedy]:
    """The likeliest continuation of each prompt, all in one batch, past any end of sequence."""
    harness = Harness(model, num_blocks=sum(-(-(len(prompt) + max_new_tokens) // BLOCK_SIZE) for prompt in prompts))
    adapters = lora or [None] * len(prompts)
    sequences = [harness.sequence(prompt, len(prompt) + max_new_tokens, adapter) for prompt, adapter in zip(prompts, adapters, strict=True)]
    results = [Greedy([], []) for _ in prompts]
    for _ in range(max_new_tokens):
        steps = harness.step(Run(sequence, len(sequence.tokens) - sequence.num_done) for sequence in sequences)
        for sequence, result, row in zip(sequences, results, steps, strict=True):
            best = row[0].topk(2)
            result.token_ids.append(int(best.indices[0]))
            result.margins.append(float(best.values[0] - best.values[1]))
            sequence.tokens.append(result.token_ids[-1])
    return results
