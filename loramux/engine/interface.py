"""What the gateway sees of an engine. `client.py` implements it over ZeroMQ; tests have an in-process twin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from loramux.engine.types import EngineInfo, EngineStats, GenerationRequest, RequestEnd, TokenDelta


class Generation(Protocol):
    """A submitted request. Exactly one `RequestEnd` concludes it, whatever happens."""

    async def admitted(self) -> None:
        """Return once the engine has admitted the request. Raises the engine's refusal, or `NoEngine` if the engine is lost."""

    def deltas(self) -> AsyncIterator[TokenDelta]:
        """Every delta until the end. Raises `NoEngine` or `EngineFailed` if the request failed after it was admitted."""

    def abort(self) -> None:
        """Stop within one step; harmless when it has ended already."""

    async def ended(self) -> RequestEnd:
        """The terminal record; made up from the counts last seen when the engine died."""


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo | None:
        """None until the engine is ready, and again while it restarts."""

    @property
    def stats(self) -> EngineStats: ...

    def submit(self, request: GenerationRequest) -> Generation:
        """Raises `NoEngine` if no engine is ready."""
