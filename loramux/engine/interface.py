"""What the gateway sees of an engine. `client.py` implements it over ZeroMQ; tests have an in-process twin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from loramux.adapters.types import Tier
from loramux.engine.types import AdapterResidency, EngineInfo, EngineStats, GenerationRequest, RequestEnd, TokenDelta


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

    @property
    def residency(self) -> Mapping[str, AdapterResidency]:
        """By digest, of every adapter that the engine has or loads; empty while no engine is ready."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Raises `NoEngine` if no engine is ready."""

    async def place(self, digest: str, tier: Tier, *, pinned: bool | None = None) -> None:
        """Return once the adapter is in the tier. A pin keeps it there; None leaves the pin as it is, False takes it away.

        Raises what the engine failed with; `Conflict` if pins would leave no room for other adapters, or the adapter was dropped
        meanwhile; `NoEngine` if no engine is ready, or it is lost.
        """

    def drop(self, digest: str) -> None:
        """Unpin the adapter, and free it on the device and in host memory once no request uses it. Nothing happens without an engine.

        The bytes on disk are the gateway's: an engine shares its gateway's directory.
        """
