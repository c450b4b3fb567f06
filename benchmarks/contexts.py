"""Decode throughput by the length of the context, beside what reading weights, keys and values from memory would allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from loramux.engine.build import build_core
from loramux.engine.config import EngineConfig
from loramux.engine.core import EngineCore
from loramux.engine.types import GenerationRequest, SamplingParams

GIB = 2**30
READ_BYTES = GIB
"""More than any cache holds."""


class Context(NamedTuple):
    num_tokens: int
    step_ms: float
    tok_s: float
    model_tok_s: float
    """At the bandwidth of memory, if a step did nothing but read the weights once and every stream's keys and values."""


class ContextSteps:
    """A core of its own, whose streams are all given the same number of tokens, then driven step by step."""

    def __init__(self, model: Path, directory: Path, dtype: str, quantization: str | None, num_kv_tokens: int, kv_per_token: int) -> None:
        kv_gib = 1.05 * num_kv_tokens * kv_per_token / GIB
        config = EngineConfig(
            model=str(model),
            endpoint="",
            data_dir=str(directory),
            dtype=dtype,
            quantization="int8" if quantization == "int8" else None,
            kv_cache_gib=kv_gib,
        )
        self._core: EngineCore = build_core(config, lambda digest: (b"", b""), wake=lambda: None)
        self._num_requests = 0

    def seconds(self, num_tokens: int, num_streams: int, num_steps: int) -> list[float]:
        """Of each decode step around that length: half of them are taken before it, half after."""
        ids = {self._submit(num_tokens - num_steps // 2, 2 * num_steps) for _ in range(num_streams)}
        prefilling = set(ids)
        while prefilling:
            self._core.step()
            prefilling -= {delta.request_id for delta in self._core.take_outputs().deltas}
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            self._core.step()
            self._core.take_outputs()
            seconds.append(time.perf_counter() - start)
        for request_id in ids:
            self._core.abort(request_id)
        self._core.take_outputs()
        return seconds

    def close(self) -> None:
        self._core.close()

    def _submit(self, num_tokens: int, max_tokens: int) -> str:
        self._num_requests += 1
        request_id = f"bench-{self._num_requests}"
        prompt = tuple((self._num_requests * 7919 + position * 31) % 40000 + 10 for position in range(num_tokens))
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        self._core.submit(GenerationRequest(request_id, "bench", "bench", prompt, sampling, b"bench"))
        while not self._core.has_work():
            time.sleep(0.001)
        return request_id


def read_gb_s(num_rounds: int = 5) -> float:
    """What torch's threads read of memory, summing numbers: the best of the rounds."""
    numbers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(num_rounds):
        start = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - start)
    return READ_BYTES / best / 1e9


def context(num_tokens: int, seconds: Sequence[float], num_streams: int, weight_bytes: int, kv_per_token: int, gb_s: float) -> Context:
    step_s = statistics.median(seconds)
    model_s = (weight_bytes + num_streams * num_tokens * kv_per_token) / (gb_s * 1e9)
    return Context(num_tokens, round(1000 * step_s, 2), round(num_streams / step_s, 1), round(num_streams / model_s, 1))
