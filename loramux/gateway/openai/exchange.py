"""One HTTP request at the engine: submitted, admitted, read to its end, and concluded by exactly one terminal record per prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from loramux.adapters.types import AdapterVersion
from loramux.engine.interface import Engine, Generation
from loramux.engine.types import GenerationRequest, RequestEnd, TokenDelta
from loramux.errors import LoramuxError, NoEngine, RequestTimeout
from loramux.gateway.in_flight import InFlight
from loramux.gateway.metrics import Metrics
from loramux.gateway.openai.responses import Choice, Format, Json
from loramux.gateway.openai.translate import PlacedConstraint, placed_in_body
from loramux.gateway.sse import DONE, error_event, event

log = logging.getLogger(__name__)

_CLOSE_S = 2.0
"""How long an engine may take to end what was aborted before the answer stops waiting for its record."""


class ChoiceDelta(NamedTuple):
    choice: int
    """Over all prompts: prompt times n plus the choice."""
    delta: TokenDelta


@dataclass(frozen=True)
class Call:
    """What a route has made of a body."""

    requests: Sequence[GenerationRequest]
    """One per prompt, each with the same `n`."""
    format: Format
    placed: PlacedConstraint | None
    version: AdapterVersion | None
    """None is the base."""
    arrived_at: float
    """Of the event loop's clock, seconds."""
    timeout_s: float
    stream: bool
    include_usage: bool
    error_body: Callable[[LoramuxError], Json]


class Exchange:
    """Of a request that has entered `in_flight`, which it leaves here. `close` must be awaited on every path; `whole` and `events` do so
    themselves."""

    def __init__(self, engine: Engine, call: Call, metrics: Metrics, in_flight: InFlight) -> None:
        self._engine, self._call, self._metrics, self._in_flight = engine, call, metrics, in_flight
        self._deadline = call.arrived_at + call.timeout_s
        self._generations: list[Generation] = []
        self._choices = [Choice(index) for index in range(sum(request.n for request in call.requests))]
        self._num_tokens = [0] * len(call.requests)
        """Generated, by prompt, as seen here."""
        self._opened: set[int] = set()
        self._last_delta_at: dict[int, float] = {}
        self._closing: asyncio.Future[list[RequestEnd]] | None = None

    async def admit(self) -> None:
        """Return when the engine has admitted every prompt. Raises the refusal, its pointers into the body, or `RequestTimeout`."""
        try:
            for request in self._call.requests:
                self._generations.append(self._engine.submit(request))
            async with asyncio.timeout_at(self._deadline):
                for generation in self._generations:
                    await generation.admitted()
        except TimeoutError:
            raise self._timed_out() from None
        except LoramuxError as error:
            raise placed_in_body(error, self._call.placed) from error

    async def whole(self) -> Json:
        """Admission and the whole response. Raises what ended the request instead."""
        try:
            await self.admit()
            async for index, delta in self._deltas():
                self._choices[index].add(delta)
            self._check_finished()
            return self._call.format.whole(self._choices, await self._ends())
        finally:
            await self.close()

    async def events(self) -> AsyncIterator[bytes]:
        """After `admit`: the whole stream as events, `[DONE]` last; a failure is an event."""
        try:
            async for index, delta in self._deltas():
                for chunk in self._chunks(index, delta):
                    yield event(chunk)
            self._check_finished()
            ends = await self._ends()
            if self._call.include_usage:
                yield event(self._call.format.usage_chunk(ends))
        except LoramuxError as error:
            yield error_event(self._call.error_body(error))
        except Exception:
            log.exception("a stream failed", extra={"fields": {"request_id": self._call.requests[0].id}})
            yield error_event(self._call.error_body(LoramuxError("internal error")))
        finally:
            await self.close()
        yield DONE

    def abort(self) -> None:
        """Stop within one step; harmless at the end."""
        for generation in self._generations:
            generation.abort()

    async def close(self) -> None:
        """Abort what still runs and see every terminal record. Safe to call again, and goes on if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._conclude())
        await asyncio.shield(self._closing)

    async def _conclude(self) -> list[RequestEnd]:
        try:
            self.abort()
            deadline = asyncio.get_running_loop().time() + _CLOSE_S
            ends = [await self._end(position, deadline) for position in range(len(self._generations))]
            tenant, version = self._call.requests[0].tenant_id, self._call.version
            self._metrics.observe_ends(ends, tenant=tenant, adapter=version.name if version else None)
            return ends
        finally:
            self._in_flight.leave(self._call.version)

    async def _end(self, position: int, deadline: float) -> RequestEnd:
        """The terminal record; from the counts seen here if the engine, which may hang, gives none by then."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self._generations[position].ended()
        except TimeoutError:
            request = self._call.requests[position]
            log.warning("the engine does not end a request", extra={"fields": {"request_id": request.id}})
            return RequestEnd(request.id, "aborted", len(request.prompt_token_ids), 0, self._num_tokens[position])

    async def _ends(self) -> list[RequestEnd]:
        return [await generation.ended() for generation in self._generations]

    def _chunks(self, index: int, delta: TokenDelta) -> Iterator[Any]:
        answer, choice = self._call.format, self._choices[index]
        if index not in self._opened:
            self._opened.add(index)
            yield answer.opening(index)
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        if delta.text or delta.logprobs:
            yield answer.chunk(index, delta)
        if delta.finish_reason is not None and delta.finish_reason != "error":
            yield answer.finish(index, delta.finish_reason, delta.stop_reason)

    async def _deltas(self) -> AsyncIterator[ChoiceDelta]:
        async with aclosing(_merged(self._generations, self._call.requests[0].n)) as merged:
            while True:
                try:
                    async with asyncio.timeout_at(self._deadline):
                        found = await anext(merged)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise self._timed_out() from None
                self._num_tokens[found.choice // self._call.requests[0].n] += len(found.delta.token_ids)
                self._observe(found.choice)
                yield found

    def _observe(self, index: int) -> None:
        now = asyncio.get_running_loop().time()
        if not self._last_delta_at:
            self._metrics.observe_first_token(now - self._call.arrived_at)
        elif index in self._last_delta_at:
            self._metrics.observe_between_tokens(now - self._last_delta_at[index])
        self._last_delta_at[index] = now

    def _check_finished(self) -> None:
        if any(choice.finish_reason in (None, "error") for choice in self._choices):
            raise NoEngine("the engine stopped before the request was finished")

    def _timed_out(self) -> RequestTimeout:
        return RequestTimeout(f"the request was not finished within {self._call.timeout_s:g} s")


async def _merged(generations: Sequence[Generation], n: int) -> AsyncGenerator[ChoiceDelta]:
    """Deltas of all generations as they come. The first failure is raised."""
    if len(generations) == 1:
        async for delta in generations[0].deltas():
            yield ChoiceDelta(delta.index, delta)
        return
    queue: asyncio.Queue[ChoiceDelta | None] = asyncio.Queue()

    async def read(position: int, generation: Generation) -> None:
        try:
            async for delta in generation.deltas():
                queue.put_nowait(ChoiceDelta(position * n + delta.index, delta))
        finally:
            queue.put_nowait(None)

    readers = [asyncio.ensure_future(read(position, generation)) for position, generation in enumerate(generations)]
    try:
        for _ in readers:
            while (found := await queue.get()) is not None:
                yield found
            for reader in readers:
                if reader.done():
                    reader.result()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
