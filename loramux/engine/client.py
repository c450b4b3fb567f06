"""A gateway's end of the engine protocol: `interface.Engine` over ZeroMQ, in one event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import zmq
import zmq.asyncio

from loramux.adapters.types import Tier
from loramux.engine.protocol import (
    HEARTBEAT_S,
    Abort,
    AdapterBytes,
    DropAdapter,
    Hello,
    NeedAdapter,
    PlaceAdapter,
    Placed,
    Shutdown,
    StepOutput,
    Submit,
    ToEngine,
    ToGateway,
    Welcome,
    decode_to_gateway,
    encode,
)
from loramux.engine.types import AdapterResidency, EngineInfo, EngineStats, GenerationRequest, RequestEnd, TokenDelta
from loramux.errors import EngineFailed, LoramuxError, NoEngine

log = logging.getLogger(__name__)

ENGINE_TIMEOUT_S = 60.0
"""An engine not heard for so long is lost. It speaks once a second, but not in the middle of a step, and a step may be slow."""

_LINGER_MS = 500
"""How long closing waits, off the loop, for an engine to take what was sent last."""

FindContents = Callable[[str], tuple[bytes, bytes] | None]
"""Digest to (adapter_config.json, adapter_model.safetensors), None where it is unknown. Called in a thread."""


class EngineGeneration:
    """A submitted request; implements `interface.Generation`, for one consumer of `deltas`.

    Deltas not read yet wait in memory: at most n times max_tokens tokens, for the engine sends no more, so that a slow consumer
    needs no other bound and never holds up the others.
    """

    def __init__(self, request: GenerationRequest, abort: Callable[[str], None]) -> None:
        self._request_id = request.id
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_completion_tokens = 0
        self._abort = abort
        self._unread: deque[TokenDelta] = deque()
        self._end: RequestEnd | None = None
        self._admitted = asyncio.Event()
        """Set when the request is admitted or has ended."""
        self._news = asyncio.Event()
        """Set when there is a delta or the end."""
        self._ended = asyncio.Event()
        self._was_admitted = False

    async def admitted(self) -> None:
        await self._admitted.wait()
        if not self._was_admitted:
            self._raise_failure()

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        while self._unread or self._end is None:
            if self._unread:
                yield self._unread.popleft()
            else:
                self._news.clear()
                await self._news.wait()
        self._raise_failure()

    def abort(self) -> None:
        if self._end is None:
            self._abort(self._request_id)

    async def ended(self) -> RequestEnd:
        await self._ended.wait()
        assert self._end is not None
        return self._end

    def _admit(self) -> None:
        self._was_admitted = True
        self._admitted.set()

    def _add(self, delta: TokenDelta) -> None:
        self._num_completion_tokens += len(delta.token_ids)
        self._unread.append(delta)
        self._news.set()

    def _conclude(self, end: RequestEnd) -> None:
        self._end = end
        for event in (self._admitted, self._news, self._ended):
            event.set()

    def _lose(self, error: LoramuxError) -> None:
        """Conclude without the engine, from the counts last seen."""
        self._conclude(RequestEnd(self._request_id, "failed", self._num_prompt_tokens, 0, self._num_completion_tokens, error.to_failure()))

    def _raise_failure(self) -> None:
        if self._end is not None and self._end.end == "failed":
            failure = self._end.failure
            raise EngineFailed("the request failed") if failure is None else LoramuxError.from_failure(failure)


class EngineClient:
    """Implements `interface.Engine`. Everything runs in the event loop that `start` was called in."""

    def __init__(self, endpoint: str, contents: FindContents, *, engine_timeout_s: float = ENGINE_TIMEOUT_S) -> None:
        self._endpoint = endpoint
        self._contents = contents
        self._engine_timeout_s = engine_timeout_s
        self._gateway_id = secrets.token_hex(8)
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._residency: dict[str, AdapterResidency] = {}
        self._heard_at = 0.0
        self._generations: dict[str, EngineGeneration] = {}
        self._placements: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def residency(self) -> Mapping[str, AdapterResidency]:
        return self._residency

    @property
    def num_in_flight(self) -> int:
        """Requests without a terminal record."""
        return len(self._generations)

    async def start(self) -> None:
        """Connect, and go on trying for as long as the engine is not there; `info` tells when it is."""
        self._context = zmq.asyncio.Context()
        self._connect()
        self._start_task(self._beat())

    async def close(self) -> None:
        """Let go of the engine, which aborts what is in flight; that ends with `NoEngine` here."""
        self._forget_engine("the gateway is stopping")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=_LINGER_MS)
        await asyncio.to_thread(self._context.term)

    def submit(self, request: GenerationRequest) -> EngineGeneration:
        if self._info is None:
            raise NoEngine("no engine is ready")
        generation = EngineGeneration(request, lambda request_id: self._send(Abort(request_id)))
        self._send(Submit(request))
        self._generations[request.id] = generation
        return generation

    async def place(self, digest: str, tier: Tier, *, pinned: bool | None = None) -> None:
        if self._info is None:
            raise NoEngine("no engine is ready")
        operation_id = secrets.token_hex(8)
        placement = self._placements[operation_id] = asyncio.get_running_loop().create_future()
        self._send(PlaceAdapter(operation_id, digest, tier, pinned))
        try:
            await placement
        finally:
            self._placements.pop(operation_id, None)

    def drop(self, digest: str) -> None:
        if self._info is not None:
            self._send(DropAdapter(digest))

    def shut_down(self) -> None:
        """Tell the engine to abort everything and exit."""
        self._send(Shutdown())

    def lost(self, reason: str) -> None:
        """The engine process has died or does not answer: fail what is in flight, and wait for an engine to come up at the endpoint.

        A new connection, so that nothing sent to the old engine reaches the new one.
        """
        self._forget_engine(reason)
        self._reader.cancel()
        self._socket.close(linger=0)
        self._connect()

    def _forget_engine(self, reason: str) -> None:
        self._info = None
        self._stats = EngineStats()
        self._residency = {}
        self._fail_all(reason)

    def _connect(self) -> None:
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(self._endpoint)
        self._reader = self._start_task(self._read(self._socket))
        self._send(Hello(self._gateway_id))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._settle_task)
        return task

    def _settle_task(self, task: asyncio.Task[None]) -> None:
        """A reader that broke is noticed as an engine that is silent, and replaced."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a task of the engine's client broke", exc_info=error)

    def _send(self, message: ToEngine) -> None:
        """Queue without waiting: the socket's queue has no bound, so only what was already written can fail, by being closed."""
        self._socket.send(encode(message))

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            self._send(Hello(self._gateway_id))
            now = time.monotonic()
            loop_was_free = now - due < HEARTBEAT_S
            if self._info is not None and loop_was_free and now - self._heard_at > self._engine_timeout_s:
                log.error("the engine does not answer", extra={"fields": {"endpoint": self._endpoint}})
                self.lost("the engine does not answer")

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            payload = await socket.recv()
            try:
                message = decode_to_gateway(payload)
            except ValueError:
                log.error("dropped a message that can't be read", extra={"fields": {"num_bytes": len(payload)}})
                continue
            self._heard_at = time.monotonic()
            self._handle(message)

    def _handle(self, message: ToGateway) -> None:
        match message:
            case Welcome():
                self._fail_all("the engine has lost the request")
                self._info = message.info
                self._residency = {each.digest: each for each in message.residency}
            case NeedAdapter():
                self._start_task(self._answer(message.digest))
            case Placed():
                self._settle_placement(message)
            case StepOutput():
                self._take(message)

    def _take(self, output: StepOutput) -> None:
        for request_id in output.admitted:
            if generation := self._generation(request_id):
                generation._admit()
        for delta in output.deltas:
            if generation := self._generation(delta.request_id):
                generation._add(delta)
        for end in output.ends:
            if generation := self._generations.pop(end.request_id, None):
                generation._conclude(end)
        for each in output.residency:
            self._update_residency(each)
        self._stats = output.stats or self._stats

    def _update_residency(self, residency: AdapterResidency) -> None:
        if residency.is_gone:
            self._residency.pop(residency.digest, None)
        else:
            self._residency[residency.digest] = residency

    def _settle_placement(self, placed: Placed) -> None:
        """One whose caller no longer waits is ignored."""
        placement = self._placements.pop(placed.operation_id, None)
        if placement is None or placement.done():
            return
        if placed.failure is None:
            placement.set_result(None)
        else:
            placement.set_exception(LoramuxError.from_failure(placed.failure))

    def _generation(self, request_id: str) -> EngineGeneration | None:
        """None, and the engine told, for a request that has ended here without it."""
        generation = self._generations.get(request_id)
        if generation is None:
            self._send(Abort(request_id))
        return generation

    async def _answer(self, digest: str) -> None:
        try:
            found = await asyncio.to_thread(self._contents, digest)
        except Exception:
            log.exception("an adapter's bytes could not be read", extra={"fields": {"digest": digest}})
            found = None
        self._send(AdapterBytes(digest, None) if found is None else AdapterBytes(digest, *found))

    def _fail_all(self, reason: str) -> None:
        """End everything in flight with `NoEngine`; an engine that is still there is told to stop."""
        generations, self._generations = self._generations, {}
        for request_id, generation in generations.items():
            self._send(Abort(request_id))
            generation._lose(NoEngine(reason))
        placements, self._placements = self._placements, {}
        for placement in placements.values():
            if not placement.done():
                placement.set_exception(NoEngine(reason))
