"""What adapters cost a step, without the socket: whole steps of an engine, and the LoRA part of a forward pass by itself."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from loramux.adapters.identity import content_digest
from loramux.engine.build import build_core
from loramux.engine.checkpoint import open_checkpoint
from loramux.engine.config import EngineConfig
from loramux.engine.model.decoder import DecoderModel
from loramux.engine.model.load import load_model
from loramux.engine.types import GenerationRequest, SamplingParams
from loramux.kernels.ops import AttentionBatch, LoraLimits, LoraSlots, SlotRows, StepLora
from loramux.kernels.select import select_ops
from loramux.lora.load import load_host_adapter
from loramux.lora.types import HostAdapter

CONTEXT = 128
BLOCK_SIZE = 32


class AdapterFiles(NamedTuple):
    digest: str
    config: bytes
    tensors: bytes


def read_adapter(directory: Path) -> AdapterFiles:
    config, tensors = ((directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
    return AdapterFiles(content_digest(config, tensors), config, tensors)


class EngineSteps:
    """A core of its own, driven step by step. Every adapter has been used once, so that all are in memory, and slots hold the last."""

    def __init__(self, model: Path, directory: Path, dtype: str, adapters: Sequence[AdapterFiles]) -> None:
        self._files = {adapter.digest: adapter for adapter in adapters}
        self._numbers = itertools.count()
        config = EngineConfig(model=str(model), endpoint="", data_dir=str(directory), dtype=dtype, kv_cache_gib=1.0)
        self._core = build_core(config, lambda digest: self._files[digest][1:], wake=lambda: None)
        for digest in self._files:
            self.prefill_s(digest, 8)

    def prefill_s(self, digest: str | None, num_tokens: int) -> float:
        """Seconds of the step that computes a prompt, one that nobody has asked before."""
        self._submit(digest, num_tokens, max_tokens=1)
        seconds = 0.0
        while self._core.has_work():
            seconds = _timed(self._core.step)
        self._core.take_outputs()
        return seconds

    def decode_s(self, digests: Sequence[str | None], num_steps: int) -> list[float]:
        """Seconds of each decode step with one stream for each digest."""
        ids = {self._submit(digest, CONTEXT, max_tokens=num_steps + 256) for digest in digests}
        prefilling = set(ids)
        while prefilling:
            self._core.step()
            prefilling -= {delta.request_id for delta in self._core.take_outputs().deltas}
        seconds = [_timed(self._core.step) for _ in range(num_steps)]
        for request_id in ids:
            self._core.abort(request_id)
        self._core.take_outputs()
        return seconds

    def close(self) -> None:
        self._core.close()

    def _submit(self, digest: str | None, num_tokens: int, max_tokens: int) -> str:
        number = next(self._numbers)
        prompt = tuple((number * 7919 + position * 31) % 40000 + 10 for position in range(num_tokens))
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        self._core.submit(GenerationRequest(f"bench-{number}", "bench", "bench", prompt, sampling, b"bench", digest))
        while not self._core.has_work():  # its adapter is being loaded
            time.sleep(0.001)
        return f"bench-{number}"


class LoraPart:
    """Forward passes of 16 single tokens, say, each beside one of the same tokens without adapters."""

    def __init__(self, model: Path, directory: Path, dtype: str, adapters: Sequence[AdapterFiles]) -> None:
        ops = select_ops("cpu")
        self._model = load_model(open_checkpoint(str(model), directory), "cpu", dtype, ops)
        self._slots = ops.lora_slots(self._model.lora_shape, LoraLimits(num_slots=len(adapters), max_rank=64, max_num_tokens=512))
        self._adapters = [_load(adapter, self._model, self._slots) for adapter in adapters]
        self._kv = self._model.new_kv_caches(256, BLOCK_SIZE)

    @property
    def adapter_bytes(self) -> int:
        return self._adapters[0].num_bytes

    def seconds(self, num_rows: int, num_adapters: int, num_steps: int) -> list[float]:
        """What adapters add to each of the steps, their plans included; the rows are shared out evenly."""
        share = num_rows // num_adapters
        rows = [SlotRows(i * share, (i + 1) * share, i, (), self._adapters[i].weights) for i in range(num_adapters)]
        return [-_timed(lambda: self._forward(num_rows, [])) + _timed(lambda: self._forward(num_rows, rows)) for _ in range(num_steps)]

    @torch.inference_mode()
    def _forward(self, num_rows: int, rows: list[SlotRows]) -> None:
        blocks_each = CONTEXT // BLOCK_SIZE
        tables = torch.arange(num_rows * blocks_each).view(num_rows, blocks_each)
        batch = AttentionBatch(tuple(range(num_rows + 1)), (CONTEXT,) * num_rows, tables, tables[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1)
        self._model.forward(
            torch.arange(num_rows) + 100,
            torch.full((num_rows,), CONTEXT - 1),
            self._kv,
            batch,
            StepLora(self._slots.plan(rows), self._slots.plan(rows)) if rows else None,
            torch.arange(num_rows),
        )


def _load(adapter: AdapterFiles, model: DecoderModel, slots: LoraSlots) -> HostAdapter:
    return load_host_adapter(*adapter, model, slots)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
