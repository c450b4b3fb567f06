"""Runs a step's plan: builds the batch, fills masks while the forward runs, samples. Reads sequences, never writes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from loramux.engine.model.decoder import DecoderModel
from loramux.engine.plan import Chunk, SampledToken, StepPlan, StepResult
from loramux.engine.prefix import BLOCK_SIZE
from loramux.engine.sampler import SampleRow, prompt_logprobs, sample
from loramux.engine.sequence import Sequence
from loramux.engine.types import TokenLogprob
from loramux.kernels.ops import AttentionBatch, LoraSlots, Ops, StepLora
from loramux.lora.batch import picked_rows, slot_rows
from loramux.lora.types import LoraSegment


@dataclass(frozen=True)
class _Batch:
    """One step's rows, in the order of `chunks`: base requests first, then slot by slot, so that one adapter's rows adjoin."""

    chunks: list[Chunk]
    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    segments: list[LoraSegment]
    logit_rows: list[int]
    """Of every token of a chunk that wants its prompt's log-probabilities, else of the last where the chunk samples."""


class ModelRunner:
    """Owns the model, the KV cache and the token bitmask."""

    def __init__(self, model: DecoderModel, ops: Ops, lora_slots: LoraSlots, *, num_blocks: int, max_num_seqs: int) -> None:
        self._model = model
        self._ops = ops
        self._lora_slots = lora_slots
        self.kv_capacity_tokens = num_blocks * BLOCK_SIZE
        self._kv = model.new_kv_caches(num_blocks, BLOCK_SIZE)
        self._bitmask = torch.zeros((max_num_seqs, -(-model.config.vocab_size // 32)), dtype=torch.int32)
        self._mask_filler = ThreadPoolExecutor(1, thread_name_prefix="mask")

    def close(self) -> None:
        self._mask_filler.shutdown()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One forward over the plan's chunks, and a token for each chunk that samples."""
        batch = _build_batch(plan)
        lora = self._lora(batch.segments, batch.logit_rows)
        logit_rows = torch.tensor(batch.logit_rows, dtype=torch.int64)
        masks = self._start_masks(plan)  # last, for the filler wants the interpreter as well
        logits = self._model.forward(batch.token_ids, batch.positions, self._kv, batch.attention, lora, logit_rows)
        if masks is not None:
            masks.result()
        return self._collect(plan, batch, logits)

    @torch.inference_mode()
    def time_step(self, num_tokens: int, num_before: int) -> float:
        """Seconds that a forward over so many tokens of one sequence takes, after so many others.

        Overwrites the first blocks, which must hold them: only before there are requests.
        """
        context_len = num_before + num_tokens
        positions = torch.arange(num_before, context_len)
        attention = AttentionBatch(
            query_starts=(0, num_tokens),
            context_lens=(context_len,),
            block_tables=torch.arange(-(-context_len // BLOCK_SIZE))[None],
            kv_slots=positions,
        )
        token_ids, last = torch.zeros(num_tokens, dtype=torch.int64), torch.tensor([num_tokens - 1])
        start = time.perf_counter()
        logits = self._model.forward(token_ids, positions, self._kv, attention, None, last)
        logits.cpu()  # a device may still be computing them
        return time.perf_counter() - start

    def _lora(self, segments: list[LoraSegment], logit_rows: list[int]) -> StepLora | None:
        """None for a step of base requests alone, which then costs what it would without adapters."""
        if not segments:
            return None
        rows = slot_rows(segments)
        return StepLora(self._lora_slots.plan(rows), self._lora_slots.plan(picked_rows(rows, logit_rows)))

    def _start_masks(self, plan: StepPlan) -> Future[None] | None:
        constrained = [chunk for chunk in plan.chunks if chunk.mask_row is not None]
        return self._mask_filler.submit(self._fill_masks, constrained) if constrained else None

    def _fill_masks(self, constrained: list[Chunk]) -> None:
        for chunk in constrained:
            assert chunk.sequence.matcher is not None and chunk.mask_row is not None
            chunk.sequence.matcher.fill(self._bitmask, chunk.mask_row)

    def _collect(self, plan: StepPlan, batch: _Batch, logits: torch.Tensor) -> StepResult:
        """Sort the logits' rows into prompt log-probabilities and samples, and the answers into the plan's order."""
        from_prompt: dict[Sequence, list[TokenLogprob]] = {}
        sampling: dict[Sequence, SampleRow] = {}
        sampling_rows: list[int] = []
        row = 0
        for chunk in batch.chunks:
            if chunk.wants_prompt_logprobs:
                from_prompt[chunk.sequence] = _prompt_logprobs(chunk, logits[row : row + chunk.num_tokens], self._ops)
                row += chunk.num_tokens - chunk.samples
            if chunk.samples:
                sampling[chunk.sequence] = _sample_row(chunk)
                sampling_rows.append(row)
                row += 1
        picked = logits if len(sampling_rows) == len(logits) else logits[torch.tensor(sampling_rows, dtype=torch.int64)]
        bitmask = self._bitmask[: plan.num_mask_rows] if plan.num_mask_rows else None
        tokens = sample(picked, list(sampling.values()), bitmask, self._ops) if sampling else []
        sampled: dict[Sequence, SampledToken] = dict(zip(sampling, tokens, strict=True))
        return StepResult(
            [sampled.get(chunk.sequence) for chunk in plan.chunks], [from_prompt.get(chunk.sequence, []) for chunk in plan.chunks]
        )


def _build_batch(plan: StepPlan) -> _Batch:
    """In lists, which become tensors at the end: of 16 single tokens, a list costs a tenth of the numpy calls that would make it."""
    chunks = sorted(plan.chunks, key=_slot_order)
    tables = np.zeros((len(chunks), max(len(chunk.sequence.blocks) for chunk in chunks)), dtype=np.int64)
    token_ids: list[int] = []
    positions: list[int] = []
    kv_slots: list[int] = []
    logit_rows: list[int] = []
    starts = [0]
    for table, chunk in zip(tables, chunks, strict=True):
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        table[: len(sequence.blocks)] = sequence.blocks.array
        token_ids += sequence.token_ids[chunk.start : end]
        positions += range(chunk.start, end)
        for index in range(chunk.start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            first = (sequence.blocks.ids[index] - index) * BLOCK_SIZE
            kv_slots += range(first + max(chunk.start, index * BLOCK_SIZE), first + min(end, (index + 1) * BLOCK_SIZE))
        starts.append(starts[-1] + chunk.num_tokens)
        logit_rows += range(starts[-2] if chunk.wants_prompt_logprobs else starts[-1] - chunk.samples, starts[-1])
    attention = AttentionBatch(
        query_starts=tuple(starts),
        context_lens=tuple([chunk.start + chunk.num_tokens for chunk in chunks]),
        block_tables=torch.from_numpy(tables),
        kv_slots=torch.tensor(kv_slots),
    )
    return _Batch(chunks, torch.tensor(token_ids), torch.tensor(positions), attention, list(_segments(chunks, starts)), logit_rows)


def _slot_order(chunk: Chunk) -> int:
    slot = chunk.sequence.slot
    return -1 if slot is None else slot


def _segments(chunks: list[Chunk], starts: list[int]) -> Iterator[LoraSegment]:
    """Runs of rows under one slot, made anew each step from who holds the slot now."""
    begin = 0
    for index, chunk in enumerate(chunks):
        last = index + 1 == len(chunks) or chunks[index + 1].sequence.slot != chunk.sequence.slot
        if last:
            adapter, slot = chunk.sequence.request.adapter, chunk.sequence.slot
            if adapter is not None and slot is not None:
                yield LoraSegment(starts[begin], starts[index + 1], slot, chunk.sequence.pages, adapter)
            begin = index + 1


def _prompt_logprobs(chunk: Chunk, logits: torch.Tensor, ops: Ops) -> list[TokenLogprob]:
    request = chunk.sequence.request.request
    targets = request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
    return prompt_logprobs(logits[: len(targets)], targets, request.sampling.num_prompt_logprobs or 0, ops)


def _sample_row(chunk: Chunk) -> SampleRow:
    sequence = chunk.sequence
    request = sequence.request.request
    return SampleRow(
        sampling=request.sampling,
        choice=sequence.index,
        token_ids=sequence.token_ids,
        num_prompt_tokens=len(request.prompt_token_ids),
        stop_ids=sequence.request.stop_ids,
        mask_row=chunk.mask_row,
    )
