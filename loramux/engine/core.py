"""The engine without its socket: requests in, outputs out, a step at a time.

A request is first prepared, off the step: its grammar is compiled and its adapter brought to host memory, while everyone else keeps
running. Then the scheduler has it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from loramux.adapters.types import Tier
from loramux.engine.block_pool import BlockPool
from loramux.engine.plan import StepPlan, StepResult
from loramux.engine.prefix import root_key
from loramux.engine.protocol import Placed
from loramux.engine.residency import AdapterResidencies
from loramux.engine.scheduler import Scheduler, TextFactory
from loramux.engine.sequence import RequestState
from loramux.engine.step_budget import StepBudget
from loramux.engine.types import AdapterResidency, EngineInfo, EngineStats, GenerationRequest, RequestEnd, TokenDelta
from loramux.errors import ContextLengthExceeded, EngineFailed, Failure, InvalidRequest, LoramuxError
from loramux.grammar.types import CompiledGrammar, GrammarService
from loramux.lora.host_cache import HostCache
from loramux.lora.slots import SlotTable
from loramux.lora.types import HostAdapter

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes a step. `runner.ModelRunner` is the real one."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


@dataclass
class CoreOutputs:
    """What happened since it was last taken."""

    admitted: list[str] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    residency: list[AdapterResidency] = field(default_factory=list)
    """Of adapters that have moved."""


@dataclass
class _Preparation:
    """A request whose grammar or adapter is not there yet."""

    request: GenerationRequest
    arrival: int
    grammar: Future[CompiledGrammar] | None
    adapter: Future[HostAdapter] | None
    ended: bool = False
    """Aborted or refused: its record is out, and what is still being prepared is given back."""

    @property
    def done(self) -> bool:
        return all(future.done() for future in (self.grammar, self.adapter) if future is not None)

    @property
    def failed(self) -> Future[CompiledGrammar] | Future[HostAdapter] | None:
        """Whichever has failed so far."""
        futures = (self.grammar, self.adapter)
        return next((future for future in futures if future is not None and future.done() and future.exception()), None)

    @property
    def loaded(self) -> HostAdapter | None:
        """The adapter, if there is one and it was loaded; it is in use then."""
        return None if self.adapter is None or self.adapter.exception() else self.adapter.result()

    @property
    def is_ripe(self) -> bool:
        """Done, or failed in one part and not refused yet: a bad schema is told before its adapter has loaded."""
        return self.done or (not self.ended and self.failed is not None)


class EngineCore:
    """Not thread-safe. `wake` is called from other threads when a preparation may have become complete."""

    def __init__(
        self,
        info: EngineInfo,
        *,
        runner: Runner,
        text_factory: TextFactory,
        grammars: GrammarService,
        adapters: HostCache[HostAdapter],
        slots: SlotTable,
        slot_turn_steps: int,
        budget: StepBudget,
        wake: Callable[[], None],
    ) -> None:
        self.info = info
        self._runner = runner
        self._grammars = grammars
        self._adapters = adapters
        self._wake = wake
        self._blocks = BlockPool(info.num_blocks)
        self._slots = slots
        self._scheduler = Scheduler(
            self._blocks,
            self._slots,
            max_num_seqs=info.max_num_seqs,
            budget=budget,
            max_model_len=info.base.max_model_len,
            text_factory=text_factory,
            slot_turn_steps=slot_turn_steps,
        )
        self._residencies = AdapterResidencies(adapters, slots, self._scheduler.slot_turns, wake)
        self._arrivals = itertools.count()
        self._preparations: dict[str, _Preparation] = {}
        self._pinned: dict[str, str] = {}
        """Request id to the digest of the adapter it keeps in host memory."""
        self._admitted: list[str] = []
        self._ends: list[RequestEnd] = []

    def submit(self, request: GenerationRequest) -> None:
        """Begin a request. Whatever comes of it appears in `take_outputs`; nothing is raised for a bad one."""
        try:
            self._check(request)
        except InvalidRequest as error:
            self._refuse(request, error.to_failure())
            return
        grammar = self._grammars.compile(request.salt, request.constraint) if request.constraint else None
        adapter = self._adapters.acquire(request.adapter_digest) if request.adapter_digest else None
        preparation = _Preparation(request, next(self._arrivals), grammar, adapter)
        self._preparations[request.id] = preparation
        for future in (grammar, adapter):
            if future is not None:
                future.add_done_callback(lambda _: self._wake())

    def abort(self, request_id: str) -> None:
        """End a request before the next step; one that has ended already is left alone."""
        preparation = self._preparations.get(request_id)
        if preparation is not None and not preparation.ended:
            preparation.ended = True
            self._ends.append(_end(preparation.request, "aborted"))
        self._scheduler.abort(request_id)

    def place(self, operation_id: str, digest: str, tier: Tier, pinned: bool | None) -> None:
        """Begin to bring an adapter to a tier; the answer is in `take_outputs`."""
        self._residencies.place(operation_id, digest, tier, pinned)

    def drop(self, digest: str) -> None:
        """Unpin an adapter, and free it once no request uses it."""
        self._residencies.drop(digest)

    @property
    def residency(self) -> tuple[AdapterResidency, ...]:
        """Of every adapter that is there or on its way, as told by `take_outputs`."""
        return self._residencies.told()

    def has_work(self) -> bool:
        """True if a step can make progress now."""
        ripe = any(preparation.is_ripe for preparation in self._preparations.values())
        return ripe or self._scheduler.has_work or self._residencies.has_work

    def step(self) -> None:
        """Admit what is prepared, and compute one step."""
        self._residencies.advance()
        self._admit_prepared()
        plan = self._scheduler.schedule()
        if plan.chunks:
            self._scheduler.apply(plan, self._runner.run(plan))

    def take_outputs(self) -> CoreOutputs:
        outputs = self._scheduler.take_outputs()
        for end in outputs.ends:
            digest = self._pinned.pop(end.request_id, None)
            if digest is not None:
                self._adapters.release(digest)
        placed, residency = self._residencies.take_placed(), self._residencies.take_changes()
        taken = CoreOutputs(self._admitted, outputs.deltas, self._ends + outputs.ends, placed, residency)
        self._admitted, self._ends = [], []
        return taken

    def stats(self) -> EngineStats:
        counters = self._scheduler.counters
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting + len(self._preparations),
            num_blocks_used=self._blocks.num_held,
            num_blocks_cached=self._blocks.num_cached,
            num_slots_used=self._slots.num_used,
            num_host_adapters=self._adapters.num_adapters,
            host_adapter_bytes=self._adapters.num_bytes,
            num_adapters_loading=self._adapters.num_loading,
            num_adapter_loads=self._adapters.num_loads,
            num_adapter_evictions=self._adapters.num_evictions,
            num_slot_turns=self._scheduler.slot_turns.num_turns,
            num_grammars=self._scheduler.num_matchers,
            num_steps=counters.num_steps,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_completion_tokens=counters.num_completion_tokens,
            num_preemptions=counters.num_preemptions,
        )

    def close(self) -> None:
        self._runner.close()
        self._grammars.close()
        self._adapters.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every pool and count agrees. For tests."""
        self._scheduler.check_integrity()
        self._adapters.check_integrity()

    def _check(self, request: GenerationRequest) -> None:
        base = self.info.base
        num_prompt_tokens = len(request.prompt_token_ids)
        if not request.salt:
            raise InvalidRequest("a request without a cache salt is refused")
        if not num_prompt_tokens:
            raise InvalidRequest("the prompt is empty")
        if request.n < 1 or request.sampling.max_tokens < 1:
            raise InvalidRequest("n and max_tokens must be at least 1")
        if not all(0 <= token < base.vocab_size for token in request.prompt_token_ids):
            raise InvalidRequest(f"prompt token ids must be from 0 to {base.vocab_size - 1}")
        if num_prompt_tokens + request.sampling.max_tokens > base.max_model_len:
            raise ContextLengthExceeded(
                f"{num_prompt_tokens} prompt tokens and {request.sampling.max_tokens} more exceed the context of {base.max_model_len}"
            )
        if request.id in self._preparations:
            raise InvalidRequest("a request with this id exists")

    def _admit_prepared(self) -> None:
        for preparation in [each for each in self._preparations.values() if each.is_ripe]:
            if preparation.failed is not None and not preparation.ended:
                preparation.ended = True
                self._refuse(preparation.request, _failure(preparation.failed))
            if preparation.done:
                del self._preparations[preparation.request.id]
                self._settle(preparation)

    def _settle(self, preparation: _Preparation) -> None:
        """Hand a prepared request to the scheduler, or undo what was prepared."""
        adapter = preparation.loaded
        if adapter is not None and not preparation.ended and (misfit := self._residencies.misfit(adapter)):
            preparation.ended = True
            self._refuse(preparation.request, misfit.to_failure())
        if not preparation.ended:
            self._admit(preparation, adapter)
        elif adapter is not None:
            self._adapters.release(adapter.digest)

    def _admit(self, preparation: _Preparation, adapter: HostAdapter | None) -> None:
        request = preparation.request
        if request.adapter_digest:
            self._pinned[request.id] = request.adapter_digest
        eos_ids = frozenset(self.info.base.eos_token_ids)
        self._scheduler.add(
            RequestState(
                request=request,
                arrival=preparation.arrival,
                adapter=adapter,
                grammar=preparation.grammar.result() if preparation.grammar else None,
                root=root_key(self.info.base.digest, request.adapter_digest, request.salt),
                stop_ids=frozenset(request.sampling.stop_token_ids) | (frozenset() if request.sampling.ignore_eos else eos_ids),
                eos_ids=eos_ids,
            )
        )
        self._admitted.append(request.id)

    def _refuse(self, request: GenerationRequest, failure: Failure) -> None:
        self._ends.append(_end(request, "failed", failure))


def _end(request: GenerationRequest, end: str, failure: Failure | None = None) -> RequestEnd:
    return RequestEnd(
        request_id=request.id,
        end="aborted" if end == "aborted" else "failed",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_completion_tokens=0,
        failure=failure,
    )


def _failure(future: Future[CompiledGrammar] | Future[HostAdapter]) -> Failure:
    error = future.exception()
    if isinstance(error, LoramuxError):
        return error.to_failure()
    log.error("a preparation failed", exc_info=error)
    return Failure(EngineFailed.code, "the request could not be prepared")
