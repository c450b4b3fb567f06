"""Small real implementations of loramux interfaces for tests: no process, no torch, same contract."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from loramux.adapters.types import BaseDescription, ModuleShape, Tier
from loramux.engine.types import (
    AdapterResidency,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestEnd,
    TokenDelta,
    TokenLogprob,
)
from loramux.errors import Conflict, EngineFailed, LoramuxError, NoEngine

TokenSource = Callable[[GenerationRequest, int, int], int]


def base_description(vocab_size: int, eos_token_ids: tuple[int, ...], max_model_len: int = 256) -> BaseDescription:
    return BaseDescription(
        digest="sha256:" + "b" * 64,
        tokenizer_digest="sha256:" + "c" * 64,
        name="tiny/base",
        model_type="llama",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        dtype="float32",
        eos_token_ids=eos_token_ids,
        max_lora_rank=64,
        modules={"model.layers.0.self_attn.q_proj": ModuleShape(16, 16)},
    )


def engine_info(base: BaseDescription) -> EngineInfo:
    return EngineInfo(
        engine_id="fake-0",
        epoch="0",
        base=base,
        device="cpu",
        kernels="reference",
        block_size=32,
        num_blocks=64,
        kv_capacity_tokens=2048,
        max_loras=4,
        max_num_seqs=16,
    )


def hashed_tokens(vocab_size: int, avoid: Sequence[int] = ()) -> TokenSource:
    """A source of tokens that is a function of (adapter, seed, choice, position) alone, never one of `avoid`."""
    allowed = [i for i in range(vocab_size) if i not in set(avoid)]

    def source(request: GenerationRequest, choice: int, position: int) -> int:
        key = f"{request.adapter_digest}/{request.sampling.seed}/{choice}/{position}".encode()
        return allowed[int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % len(allowed)]

    return source


def scripted_tokens(token_ids: Sequence[int], eos_token_id: int) -> TokenSource:
    """Every choice says `token_ids`, then end of sequence."""

    def source(request: GenerationRequest, choice: int, position: int) -> int:
        return token_ids[position] if position < len(token_ids) else eos_token_id

    return source


@dataclass
class Behaviour:
    """What goes wrong. Counts are of tokens per choice; set it before the request is submitted."""

    refuse: LoramuxError | None = None
    """Raised by `admitted()`."""
    never_admit: bool = False
    fail_after: int | None = None
    """The request fails with `engine_failed` after so many tokens."""
    hang_after: int | None = None
    """Nothing more comes after so many tokens, until the request is aborted or the engine told to `resume`."""
    deaf: bool = False
    """Aborting changes nothing: with `hang_after`, the request ends when the test has it `fail`, if ever."""
    die_after: int | None = None
    """The whole engine dies after so many tokens: every request fails with `no_engine`."""
    refuse_place: LoramuxError | None = None
    """Raised by `place`."""


class FakeEngine:
    """`engine.interface.Engine` in this event loop. Tokens come from `source`, text from `decode`.

    `requests` and `ends` record everything submitted and every terminal record, in order. An adapter loads in `load_s`, and is in a
    slot from its first request on.
    """

    def __init__(self, info: EngineInfo, decode: Callable[[Sequence[int]], str], source: TokenSource, *, step_s: float = 0.0) -> None:
        self._info = info
        self.decode = decode
        self.source = source
        self.step_s = step_s
        self.behaviour = Behaviour()
        self.alive = True
        self.requests: list[GenerationRequest] = []
        self.ends: list[RequestEnd] = []
        self.running: dict[str, FakeGeneration] = {}
        self.load_s = 0.0
        self.residency: dict[str, AdapterResidency] = {}

    @property
    def info(self) -> EngineInfo | None:
        return self._info if self.alive else None

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.running), num_completion_tokens=sum(end.num_completion_tokens for end in self.ends))

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if not self.alive:
            raise NoEngine("no engine is ready")
        self.requests.append(request)
        generation = self.running[request.id] = FakeGeneration(self, request)
        if request.adapter_digest is not None:
            self._set(request.adapter_digest, tier="device", state="ready")
        return generation

    async def place(self, digest: str, tier: Tier, *, pinned: bool | None = None) -> None:
        if self.behaviour.refuse_place is not None:
            raise self.behaviour.refuse_place
        others = [each for each in self.residency.values() if each.pinned and each.tier == "device" and each.digest != digest]
        if pinned and tier == "device" and len(others) >= self._info.max_loras - 1:
            raise Conflict("pins would leave no slot free")
        if digest not in self.residency:
            self._set(digest, tier="none", state="loading")
            await asyncio.sleep(self.load_s)
        if not self.alive:
            raise NoEngine("the engine was lost")
        if digest not in self.residency:
            raise Conflict("the adapter was dropped")
        found = self.residency[digest]
        self._set(
            digest,
            tier="device" if "device" in (tier, found.tier) else "host",
            state="ready",
            pinned=found.pinned if pinned is None else pinned,
        )

    def drop(self, digest: str) -> None:
        if any(generation.adapter_digest == digest for generation in self.running.values()):
            self._set(digest, state="draining", pinned=False)
        else:
            self.residency.pop(digest, None)

    def _set(self, digest: str, **changes: object) -> None:
        found = self.residency.get(digest) or AdapterResidency(digest, "none", num_bytes=64, rank=4)
        self.residency[digest] = msgspec.structs.replace(found, **changes)

    def _ended(self, generation: FakeGeneration, end: RequestEnd) -> None:
        self.ends.append(end)
        self.running.pop(end.request_id, None)
        digest = generation.adapter_digest
        if digest is not None and digest in self.residency and self.residency[digest].state == "draining":
            self.drop(digest)

    def resume(self) -> None:
        """Let what hangs go on to its end."""
        for generation in self.running.values():
            generation.resume()

    def die(self) -> None:
        self.alive = False
        self.residency = {}
        for generation in list(self.running.values()):
            generation.fail(NoEngine("the engine was lost"))

    def revive(self) -> None:
        """As a new run of the engine."""
        self.alive = True
        self._info = msgspec.structs.replace(self._info, epoch=str(int(self._info.epoch) + 1))


class _Choice:
    """The tokens and text of one choice so far."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest, index: int) -> None:
        self.engine, self.request, self.index = engine, request, index
        self.token_ids: list[int] = []
        self.num_sent = 0
        self.finished = False

    def step(self) -> TokenDelta:
        sampling = self.request.sampling
        token_id = self.engine.source(self.request, self.index, len(self.token_ids))
        stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else self.engine._info.base.eos_token_ids)
        self.token_ids.append(token_id)
        ended = len(self.token_ids) > sampling.min_tokens and token_id in stop_ids
        text = self.engine.decode(self.token_ids[:-1] if ended else self.token_ids)
        stop_string = next((s for s in sampling.stop if s in text), None)
        reason: FinishReason | None = None
        if ended or stop_string:
            reason = "stop"
        elif len(self.token_ids) >= sampling.max_tokens:
            reason = "length"
        self.finished = reason is not None
        return TokenDelta(
            request_id=self.request.id,
            index=self.index,
            token_ids=(token_id,),
            text=self._new_text(text, stop_string),
            logprobs=(_logprob(token_id, sampling.num_logprobs),) if sampling.num_logprobs is not None else (),
            prompt_logprobs=self._prompt_logprobs(),
            finish_reason=reason,
            stop_reason=stop_string or (token_id if token_id in sampling.stop_token_ids and ended else None),
        )

    def _new_text(self, text: str, stop_string: str | None) -> str:
        if stop_string:
            text = text[: text.index(stop_string)]
        held_back = 0 if self.finished else max((len(s) - 1 for s in self.request.sampling.stop), default=0)
        end = len(text) - held_back
        while not self.finished and end > self.num_sent and text[end - 1] == "\ufffd":
            end -= 1
        new = text[self.num_sent : max(end, self.num_sent)]
        self.num_sent += len(new)
        return new

    def _prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        asked = self.request.sampling.num_prompt_logprobs
        if asked is None or self.index or len(self.token_ids) > 1:
            return None
        return (None, *(_logprob(token_id, asked) for token_id in self.request.prompt_token_ids[1:]))


def _logprob(token_id: int, num_top: int | None) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5, 1, tuple((token_id + i if i == 0 else i, -0.5 - i) for i in range(num_top or 0)))


class FakeGeneration:
    """`engine.interface.Generation`: a task of this event loop steps every choice by a token, then sleeps `step_s`."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self._engine, self._request = engine, request
        self._behaviour = engine.behaviour
        self._choices = [_Choice(engine, request, index) for index in range(request.n)]
        self._queue: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end: asyncio.Future[RequestEnd] = asyncio.get_running_loop().create_future()
        self._error: LoramuxError | None = None
        self._task = asyncio.create_task(self._run())

    @property
    def adapter_digest(self) -> str | None:
        return self._request.adapter_digest

    async def admitted(self) -> None:
        await asyncio.shield(self._admitted)
        if self._error is not None:
            raise self._error

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        while (delta := await self._queue.get()) is not None:
            yield delta
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        if not self._behaviour.deaf:
            self._conclude("aborted")

    def resume(self) -> None:
        self._behaviour = replace(self._behaviour, hang_after=None)
        if self._task.done():
            self._task = asyncio.create_task(self._step_on())

    def fail(self, error: LoramuxError) -> None:
        self._error = error
        self._conclude("failed")

    async def ended(self) -> RequestEnd:
        return await asyncio.shield(self._end)

    async def _run(self) -> None:
        behaviour = self._behaviour
        if behaviour.never_admit:
            return None
        if behaviour.refuse is not None:
            return self.fail(behaviour.refuse)
        self._admitted.set_result(None)
        return await self._step_on()

    async def _step_on(self) -> None:
        num_steps = 0
        while not self._end.done():
            if num_steps == self._behaviour.hang_after:
                return None
            if num_steps == self._behaviour.fail_after:
                return self.fail(EngineFailed("the forward pass failed"))
            if num_steps == self._behaviour.die_after:
                return self._engine.die()
            for choice in self._choices:
                if not choice.finished:
                    self._queue.put_nowait(choice.step())
            num_steps += 1
            if all(choice.finished for choice in self._choices):
                return self._conclude("finished")
            await asyncio.sleep(self._engine.step_s)
        return None

    def _conclude(self, how: str) -> None:
        if self._end.done():
            return
        end = RequestEnd(
            request_id=self._request.id,
            end=how,  # type: ignore[arg-type]
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=len(self._request.prompt_token_ids) // 32 * 32,
            num_completion_tokens=sum(len(choice.token_ids) for choice in self._choices),
            failure=None if self._error is None else self._error.to_failure(),
        )
        self._end.set_result(end)
        self._engine._ended(self, end)
        if not self._admitted.done():
            self._admitted.set_result(None)
        self._queue.put_nowait(None)
