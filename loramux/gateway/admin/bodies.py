"""Bodies of the admin routes. A field that a body does not have, or that is not built yet, is a 400 `unsupported_parameter`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from loramux.adapters.types import Tier

Weight = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
TenantIds = Annotated[list[str], Field(max_length=1000)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NewTenant(Body):
    id: str
    weight: Weight = 1.0


class TenantChange(Body):
    weight: Weight


class NewKeyBody(Body):
    scopes: Annotated[list[str], Field(min_length=1, max_length=16)] = ["infer"]
    expires_at: Annotated[AwareDatetime | None, Field(strict=False)] = None
    """Unix seconds, or ISO 8601 with an offset."""


class Source(Body):
    uri: Annotated[str, Field(min_length=1, max_length=4096)]
    sha256: Annotated[str, Field(pattern=r"^(sha256:)?[0-9a-f]{64}$")] | None = None
    """Of adapter_model.safetensors."""


class Preload(Body):
    """Where a new version shall be before the answer."""

    tier: Literal["none", "host", "device"] = "none"
    min_engines: Annotated[int, Field(ge=1)] = 1


class VersionFields(Body):
    """What JSON and multipart registrations have in common."""

    base: str
    tenants: TenantIds = []
    preload: Preload = Preload()


class NewVersion(VersionFields):
    source: Source


class PreloadTarget(Body):
    tier: Tier = "device"


class Pin(PreloadTarget):
    pinned: bool = True


class AliasTarget(Body):
    version: Annotated[int, Field(ge=1)]


class Grants(Body):
    tenants: TenantIds
