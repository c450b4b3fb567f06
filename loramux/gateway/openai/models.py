"""Which model a request means: the base, or an exact version of an adapter, resolved once."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

from loramux.adapters.ref import ModelRef, parse_model
from loramux.adapters.types import AdapterVersion
from loramux.engine.types import EngineInfo
from loramux.errors import NoEngine
from loramux.gateway.openai.translate import Target
from loramux.gateway.services import Services
from loramux.gateway.tenancy.types import Principal

MODEL_HEADER = "x-loramux-model"
_IN_HEADERS = "".join(set(map(chr, range(0x21, 0x7F))) - set(";%"))
"""Characters of a base's name that stand as they are in a header; the rest is percent-encoded."""


class Resolved(NamedTuple):
    ref: ModelRef
    info: EngineInfo
    version: AdapterVersion | None
    """None is the base."""

    @property
    def target(self) -> Target:
        return Target(self.info.base, self.info.max_num_seqs, self.version.digest if self.version else None)

    @property
    def header(self) -> str:
        """What answers, for `x-loramux-model`."""
        base = quote(self.ref.base, safe=_IN_HEADERS)
        if self.version is None:
            return f"{base}; digest={self.info.base.digest}"
        return f"{base}:{self.version.id}; digest={self.version.digest}"


async def resolve(services: Services, principal: Principal, model: str) -> Resolved:
    """Raises `ModelNotFound`, the same for what is unknown and what is not granted; `NoEngine`; `StoreUnavailable`."""
    info = services.engine.info
    if info is None:
        raise NoEngine("no engine is ready")
    ref = parse_model(model, (services.served_model_name,))
    if ref.adapter is None:
        return Resolved(ref, info, None)
    return Resolved(ref, info, await services.registry.resolve(ref, principal.tenant_id, base_digest=info.base.digest))


async def visible_ids(services: Services, principal: Principal) -> list[str]:
    """The model names that the tenant may use, the base first; without adapters of another base, once an engine has said which it has."""
    base, info = services.served_model_name, services.engine.info
    names = await services.registry.visible(principal.tenant_id, base_digest=info.base.digest if info else None)
    return [base, *(f"{base}:{name}" for name in names)]
