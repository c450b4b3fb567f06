"""What an engine's step costs outside the model's forward pass: scheduling, batch, sampling, text and the message to the gateway."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from loramux.engine.build import build_core
from loramux.engine.config import EngineConfig
from loramux.engine.core import CoreOutputs, EngineCore
from loramux.engine.model.decoder import DecoderModel
from loramux.engine.protocol import StepOutput, encode
from loramux.engine.types import GenerationRequest, SamplingParams
from loramux.grammar.types import Constraint

CONTEXT = 128

_SCHEMA = Constraint("json_schema", '{"type": "array", "minItems": 1000, "items": {"type": "string", "minLength": 5, "maxLength": 40}}')


class Case(NamedTuple):
    """How every stream is sampled."""

    sampling: Mapping[str, Any]
    constraint: Constraint | None = None


CASES: dict[str, Case] = {
    "greedy": Case({"temperature": 0.0}),
    "top_p": Case({"temperature": 0.8, "top_p": 0.95}),
    "top_k": Case({"temperature": 1.0, "top_k": 50}),
    "schema": Case({"temperature": 0.0}, _SCHEMA),
    "logprobs": Case({"temperature": 0.0, "num_logprobs": 5}),
}


class OutsideSteps:
    """A core of its own, driven step by step."""

    def __init__(self, model: Path, directory: Path, dtype: str) -> None:
        config = EngineConfig(model=str(model), endpoint="", data_dir=str(directory), dtype=dtype, kv_cache_gib=1.0)
        self._core: EngineCore = build_core(config, lambda digest: (b"", b""), wake=lambda: None)
        self._numbers = itertools.count()

    def seconds(self, case: Case, num_streams: int, num_steps: int) -> list[float]:
        """Of each decode step, its outputs taken and encoded, less what the forward pass took."""
        ids = {self._submit(case, num_steps + num_streams + 64) for _ in range(num_streams)}
        prefilling = set(ids)
        while prefilling:
            if self._core.has_work():
                self._core.step()
                prefilling -= {delta.request_id for delta in self._core.take_outputs().deltas}
        seconds = [self._step(num_streams) for _ in range(num_steps)]
        for request_id in ids:
            self._core.abort(request_id)
        self._core.take_outputs()
        return seconds

    def close(self) -> None:
        self._core.close()

    def _step(self, num_streams: int) -> float:
        with _timed_forward() as forward:
            start = time.perf_counter()
            self._core.step()
            outputs = self._core.take_outputs()
            _encoded(outputs)
            seconds = time.perf_counter() - start
        if len(outputs.deltas) != num_streams:
            raise SystemExit(f"a step of {num_streams} streams gave {len(outputs.deltas)} tokens")
        return seconds - forward.seconds

    def _submit(self, case: Case, max_tokens: int) -> str:
        number = next(self._numbers)
        prompt = tuple((number * 7919 + position * 31) % 40000 + 10 for position in range(CONTEXT))
        sampling = SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=case.constraint is None, **case.sampling)
        self._core.submit(GenerationRequest(f"bench-{number}", "bench", "bench", prompt, sampling, b"bench", constraint=case.constraint))
        return f"bench-{number}"


def _encoded(outputs: CoreOutputs) -> bytes:
    return encode(StepOutput(admitted=tuple(outputs.admitted), deltas=tuple(outputs.deltas), ends=tuple(outputs.ends)))


class _Forward:
    seconds = 0.0


@contextmanager
def _timed_forward() -> Iterator[_Forward]:
    """The time spent in `DecoderModel.forward` of whatever engine runs meanwhile."""
    spent, forward = _Forward(), DecoderModel.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return forward(*args, **kwargs)
        finally:
            spent.seconds += time.perf_counter() - start

    DecoderModel.forward = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        DecoderModel.forward = forward  # type: ignore[method-assign]
