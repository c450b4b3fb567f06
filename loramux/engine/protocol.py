"""The messages between gateway and engine: MessagePack over ZeroMQ, the gateway a DEALER, the engine a ROUTER.

A gateway says `Hello` first and then beats at least every `HEARTBEAT_S`; the engine aborts the requests of a gateway not heard
for `GATEWAY_TIMEOUT_S`. Per step an engine sends each gateway at most one `StepOutput`.
"""

from __future__ import annotations

import msgspec

from loramux.adapters.types import Tier
from loramux.engine.types import AdapterResidency, EngineInfo, EngineStats, GenerationRequest, RequestEnd, TokenDelta
from loramux.errors import Failure

HEARTBEAT_S = 2.0
GATEWAY_TIMEOUT_S = 15.0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a gateway, and its heartbeat. Answered with `Welcome` once the engine is ready, and only where the engine does not
    know the connection: a second `Welcome` means that the engine has forgotten the gateway, and aborted what it had in flight."""

    gateway_id: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class AdapterBytes(msgspec.Struct, frozen=True, tag=True):
    """The content asked for by `NeedAdapter`; `config` is None when the gateway does not have it."""

    digest: str
    config: bytes | None
    """adapter_config.json"""
    tensors: bytes = b""
    """adapter_model.safetensors"""


class PlaceAdapter(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Bring an adapter to a tier; answered with `Placed`."""

    operation_id: str
    digest: str
    tier: Tier
    pinned: bool | None = None
    """Keep it in the tier; False takes the pin away, None leaves it as it is."""


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Unpin an adapter, and free it on the device and in host memory once no request uses it."""

    digest: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish nothing more: end every request as aborted and exit 0."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo
    residency: tuple[AdapterResidency, ...] = ()
    """Of every adapter that is there, or on its way."""


class NeedAdapter(msgspec.Struct, frozen=True, tag=True):
    digest: str


class Placed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The adapter is where `PlaceAdapter` wanted it, or why not."""

    operation_id: str
    failure: Failure | None = None


class StepOutput(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Everything that happened to one gateway's requests, and to the engine's adapters, since the last one."""

    admitted: tuple[str, ...] = ()
    """Requests whose grammar is compiled and whose adapter is in host memory: the HTTP status is 200 from here on."""
    deltas: tuple[TokenDelta, ...] = ()
    ends: tuple[RequestEnd, ...] = ()
    stats: EngineStats | None = None
    residency: tuple[AdapterResidency, ...] = ()
    """What has changed, the same for every gateway."""


ToEngine = Hello | Submit | Abort | AdapterBytes | PlaceAdapter | DropAdapter | Shutdown
ToGateway = Welcome | NeedAdapter | Placed | StepOutput

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_gateway = msgspec.msgpack.Decoder(ToGateway).decode
