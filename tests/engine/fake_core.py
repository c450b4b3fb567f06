"""A core without a model, behind the real socket loop. `python -m tests.engine.fake_core` is the real process around it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from loramux.adapters.types import Tier
from loramux.engine.config import EngineConfig
from loramux.engine.core import CoreOutputs
from loramux.engine.process import main
from loramux.engine.protocol import Placed
from loramux.engine.types import (
    AdapterResidency,
    EngineInfo,
    EngineStats,
    GenerationRequest,
    RequestEnd,
    SamplingParams,
    TokenDelta,
)
from loramux.errors import AdapterLoading, InvalidRequest, LoramuxError, StartupFailed
from tests.fakes import base_description, engine_info

BROKEN = 666
"""A prompt of this token breaks the step."""
REFUSED = 400
"""A prompt of this token is refused."""
STEP_S = 0.002


def make_request(
    request_id: str, *, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2), adapter: str | None = None
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return GenerationRequest(request_id, "acme", "acme.0", prompt, sampling, b"the-secret-salt", adapter)


class FakeCore:
    """One token per request and step: its position. A request for an adapter waits for the bytes, and begins with their length."""

    def __init__(self, fetch: Callable[[str], tuple[bytes, bytes]], wake: Callable[[], None]) -> None:
        self._fetch = fetch
        self._wake = wake
        self._loader = ThreadPoolExecutor(4)
        self._residency: dict[str, AdapterResidency] = {}
        self._waiting: dict[str, tuple[GenerationRequest, Future[tuple[bytes, bytes]]]] = {}
        self._running: dict[str, GenerationRequest] = {}
        self._num_tokens: dict[str, int] = {}
        self._outputs = CoreOutputs()
        self._num_steps = 0

    @property
    def info(self) -> EngineInfo:
        return engine_info(base_description(100, (0,)))

    def submit(self, request: GenerationRequest) -> None:
        if request.prompt_token_ids[0] == REFUSED:
            self._end(request, "failed", InvalidRequest("no such prompt"))
        elif request.adapter_digest:
            future = self._loader.submit(self._fetch, request.adapter_digest)
            self._waiting[request.id] = (request, future)
            future.add_done_callback(lambda _: self._wake())
        else:
            self._admit(request)

    def abort(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        request = waiting[0] if waiting else self._running.pop(request_id, None)
        if request:
            self._end(request, "aborted")

    def place(self, operation_id: str, digest: str, tier: Tier, pinned: bool | None) -> None:
        """Done at once; an adapter named `missing` is not to be had."""
        if digest == "missing":
            self._outputs.placed.append(Placed(operation_id, AdapterLoading("no gateway has it").to_failure()))
            return
        self._outputs.placed.append(Placed(operation_id))
        self._move(AdapterResidency(digest, tier, pinned=bool(pinned), num_bytes=7, rank=8))

    def drop(self, digest: str) -> None:
        self._move(AdapterResidency(digest, "none"))

    @property
    def residency(self) -> tuple[AdapterResidency, ...]:
        return tuple(self._residency.values())

    def has_work(self) -> bool:
        return bool(self._running) or any(future.done() for _, future in self._waiting.values())

    def step(self) -> None:
        """Paced like a small model's, so that a slow reader can keep up."""
        time.sleep(STEP_S)
        self._num_steps += 1
        for request_id, (request, future) in list(self._waiting.items()):
            if future.done():
                del self._waiting[request_id]
                self._settle(request, future)
        for request in list(self._running.values()):
            self._advance(request)

    def take_outputs(self) -> CoreOutputs:
        outputs, self._outputs = self._outputs, CoreOutputs()
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), num_waiting=len(self._waiting), num_steps=self._num_steps)

    def close(self) -> None:
        self._loader.shutdown()

    def _move(self, residency: AdapterResidency) -> None:
        self._outputs.residency.append(residency)
        self._residency.pop(residency.digest, None)
        if residency.tier != "none":
            self._residency[residency.digest] = residency

    def _settle(self, request: GenerationRequest, future: Future[tuple[bytes, bytes]]) -> None:
        error = future.exception()
        if isinstance(error, LoramuxError):
            self._end(request, "failed", error)
        else:
            self._admit(request)
            self._emit(request, sum(len(part) for part in future.result()))

    def _admit(self, request: GenerationRequest) -> None:
        self._running[request.id] = request
        self._num_tokens[request.id] = 0
        self._outputs.admitted.append(request.id)

    def _advance(self, request: GenerationRequest) -> None:
        if request.prompt_token_ids[0] == BROKEN:
            raise RuntimeError("the step is broken")
        self._emit(request, self._num_tokens[request.id])
        if self._num_tokens[request.id] >= request.sampling.max_tokens:
            del self._running[request.id]
            self._end(request, "finished")

    def _emit(self, request: GenerationRequest, token_id: int) -> None:
        self._num_tokens[request.id] += 1
        self._outputs.deltas.append(TokenDelta(request.id, 0, (token_id,), f"{token_id} "))

    def _end(self, request: GenerationRequest, end: str, error: LoramuxError | None = None) -> None:
        num_tokens = self._num_tokens.pop(request.id, 0)
        failure = error.to_failure() if error else None
        self._outputs.ends.append(RequestEnd(request.id, end, len(request.prompt_token_ids), 0, num_tokens, failure))  # type: ignore[arg-type]


def build(config: EngineConfig, fetch: Callable[[str], tuple[bytes, bytes]], wake: Callable[[], None]) -> FakeCore:
    if config.model == "missing":
        raise StartupFailed("no model at 'missing'; give --model a directory")
    return FakeCore(fetch, wake)


if __name__ == "__main__":
    sys.exit(main(build))
