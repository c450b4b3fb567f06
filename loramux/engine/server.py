"""The engine's loop: messages in, a step, one message out to each gateway."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

import zmq

from loramux.adapters.types import Tier
from loramux.engine.adapter_fetch import AdapterFetch
from loramux.engine.core import CoreOutputs
from loramux.engine.protocol import (
    GATEWAY_TIMEOUT_S,
    Abort,
    AdapterBytes,
    DropAdapter,
    Hello,
    NeedAdapter,
    PlaceAdapter,
    Shutdown,
    StepOutput,
    Submit,
    ToEngine,
    ToGateway,
    Welcome,
    decode_to_engine,
    encode,
)
from loramux.engine.types import AdapterResidency, EngineInfo, EngineStats, GenerationRequest, RequestEnd
from loramux.errors import EngineFailed, Failure

log = logging.getLogger(__name__)

STATS_S = 1.0
_LINGER_MS = 2000
_MAX_MESSAGES = 256
"""Read between two steps."""


class Core(Protocol):
    """What the loop drives; `core.EngineCore` is the real one."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def place(self, operation_id: str, digest: str, tier: Tier, pinned: bool | None) -> None: ...

    def drop(self, digest: str) -> None: ...

    @property
    def residency(self) -> tuple[AdapterResidency, ...]: ...

    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def take_outputs(self) -> CoreOutputs: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class Wake:
    """Ends the loop's wait, from any thread or signal handler. Lives as long as the process: a thread may call it to the very end."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __call__(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)


@dataclass
class _Gateway:
    """One connection of a gateway; a new connection is a new one, and what the old one had in flight is lost to it."""

    routing_id: bytes
    heard_at: float
    gateway_id: str | None = None
    """None until it has said hello."""
    request_ids: set[str] = field(default_factory=set)


@dataclass
class _InFlight:
    """Counts for the terminal record of a request that the core can no longer answer for."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0


class EngineServer:
    """Owns the socket and the core. One thread runs it."""

    def __init__(self, socket: zmq.Socket[bytes], core: Core, fetch: AdapterFetch, wake: Wake) -> None:
        self._socket = socket
        self._core = core
        self._fetch = fetch
        self._wake = wake
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(wake.fd, zmq.POLLIN)
        self._gateways: dict[bytes, _Gateway] = {}
        self._in_flight: dict[str, _InFlight] = {}
        self._placements: dict[str, bytes] = {}
        """Operation id to the gateway that waits for it."""
        self._next_stats = 0.0
        self._stopping = False

    def stop(self) -> None:
        """End every request as aborted and return from `run`. Callable from a signal handler."""
        self._stopping = True
        self._wake()

    def run(self) -> int:
        """Serve until told to stop: 0. An exception of the core fails every request, because its state is unknown then: 1."""
        try:
            while not self._stopping:
                self._turn()
            self._abort_all()
        except Exception:
            log.critical("the engine failed", exc_info=True)
            self._end_all("failed", EngineFailed("the engine failed and is restarted").to_failure())
            return 1
        return 0

    def _turn(self) -> None:
        self._receive(0 if self._core.has_work() else self._idle_ms())
        self._drop_silent()
        for routing_id, digest in self._fetch.questions([each.routing_id for each in self._gateways.values() if each.gateway_id]):
            if gateway := self._gateways.get(routing_id):  # the question before may have found it unreachable
                self._send(gateway, NeedAdapter(digest))
        if self._core.has_work():
            self._core.step()
        self._deliver(self._core.take_outputs(), self._stats_if_due())

    def _idle_ms(self) -> int:
        return max(0, int((self._next_stats - time.monotonic()) * 1000) + 1)

    def _stats_if_due(self) -> EngineStats | None:
        now = time.monotonic()
        if now < self._next_stats:
            return None
        self._next_stats = now + STATS_S
        return self._core.stats()

    def _receive(self, timeout_ms: int) -> None:
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake.fd in ready:
            self._wake.clear()
        for _ in range(_MAX_MESSAGES):
            try:
                routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(routing_id, frames)

    def _take(self, routing_id: bytes, frames: list[bytes]) -> None:
        """Any message counts as a sign of life. One that can't be read is dropped; only its size is logged, for it may hold a prompt."""
        try:
            (payload,) = frames
            message = decode_to_engine(payload)
        except (ValueError, RecursionError) as error:
            fields = {"error": type(error).__name__, "num_bytes": sum(len(frame) for frame in frames)}
            log.warning("dropped a message that can't be read", extra={"fields": fields})
            return
        gateway = self._gateways.setdefault(routing_id, _Gateway(routing_id, 0.0))
        gateway.heard_at = time.monotonic()
        self._handle(gateway, message)

    def _handle(self, gateway: _Gateway, message: ToEngine) -> None:
        match message:
            case Hello():
                self._greet(gateway, message.gateway_id)
            case Submit():
                self._submit(gateway, message.request)
            case Abort():
                if message.request_id in gateway.request_ids:
                    self._core.abort(message.request_id)
            case AdapterBytes():
                self._fetch.answer(gateway.routing_id, message)
            case PlaceAdapter():
                self._placements[message.operation_id] = gateway.routing_id
                self._core.place(message.operation_id, message.digest, message.tier, message.pinned)
            case DropAdapter():
                self._core.drop(message.digest)
            case Shutdown():
                self.stop()

    def _greet(self, gateway: _Gateway, gateway_id: str) -> None:
        if gateway.gateway_id == gateway_id:
            return
        for older in [each for each in self._gateways.values() if each.gateway_id == gateway_id]:
            self._drop(older, "connected anew")
        gateway.gateway_id = gateway_id
        log.info("a gateway connected", extra={"fields": {"gateway_id": gateway_id}})
        self._send(gateway, Welcome(self._core.info, self._core.residency))

    def _submit(self, gateway: _Gateway, request: GenerationRequest) -> None:
        if request.id in self._in_flight:
            log.warning("dropped a request whose id is in flight", extra={"fields": {"request_id": request.id}})
            return
        self._in_flight[request.id] = _InFlight(len(request.prompt_token_ids))
        gateway.request_ids.add(request.id)
        self._core.submit(request)

    def _drop_silent(self) -> None:
        """Called once the messages that came during a long step have been read."""
        now = time.monotonic()
        for gateway in list(self._gateways.values()):
            if now - gateway.heard_at > GATEWAY_TIMEOUT_S:
                self._drop(gateway, "silent")

    def _drop(self, gateway: _Gateway, why: str) -> None:
        """Forget a gateway and abort its requests; if it is there after all, its next hello is answered like a first one."""
        del self._gateways[gateway.routing_id]
        fields = {"gateway_id": gateway.gateway_id, "why": why, "num_requests": len(gateway.request_ids)}
        log.warning("a gateway is gone", extra={"fields": fields})
        for request_id in gateway.request_ids:
            self._core.abort(request_id)
        self._wake()  # what it was asked for, the next is asked for at once

    def _deliver(self, outputs: CoreOutputs, stats: EngineStats | None = None) -> None:
        for delta in outputs.deltas:
            self._in_flight[delta.request_id].num_completion_tokens += len(delta.token_ids)
        residency = tuple(outputs.residency)
        for gateway in list(self._gateways.values()):
            owned = gateway.request_ids
            message = StepOutput(
                admitted=tuple(request_id for request_id in outputs.admitted if request_id in owned),
                deltas=tuple(delta for delta in outputs.deltas if delta.request_id in owned),
                ends=tuple(end for end in outputs.ends if end.request_id in owned),
                stats=stats,
                residency=residency,
            )
            owned.difference_update(end.request_id for end in message.ends)
            if message != StepOutput():
                self._send(gateway, message)
        for end in outputs.ends:
            del self._in_flight[end.request_id]
        for placed in outputs.placed:
            asker = self._gateways.get(self._placements.pop(placed.operation_id))
            if asker is not None:
                self._send(asker, placed)

    def _send(self, gateway: _Gateway, message: ToGateway) -> None:
        try:
            self._socket.send_multipart([gateway.routing_id, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._drop(gateway, "unreachable")

    def _abort_all(self) -> None:
        for request_id in list(self._in_flight):
            self._core.abort(request_id)
        self._deliver(self._core.take_outputs())
        self._end_all("aborted")

    def _end_all(self, end: Literal["aborted", "failed"], failure: Failure | None = None) -> None:
        """End what is still in flight without asking the core."""
        records = [
            RequestEnd(request_id, end, request.num_prompt_tokens, 0, request.num_completion_tokens, failure)
            for request_id, request in self._in_flight.items()
        ]
        self._deliver(CoreOutputs(ends=records))


def bind(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """The engine's socket. What a slow gateway has not read is bounded by how long a silent one is kept, not by a number of messages;
    sending to one that is gone is an error instead of a message lost without notice. Raises `zmq.ZMQError`."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.bind(endpoint)
    return socket
