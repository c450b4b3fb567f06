"""Registering a version: what JSON and multipart requests come down to."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from loramux.adapters.contents import AdapterFiles
from loramux.adapters.peft_format import raise_if_invalid, validate
from loramux.adapters.ref import check_name
from loramux.adapters.registry import EVERYONE, Registered
from loramux.adapters.types import BaseDescription, RegistrationReport
from loramux.errors import AdapterInvalid, InvalidRequest, ModelNotFound, NoEngine, NotFound
from loramux.gateway.admin.bodies import VersionFields
from loramux.gateway.services import Services


class Target(NamedTuple):
    """Where a version will go, checked before any byte is read."""

    name: str
    base: BaseDescription
    tenants: Sequence[str]


async def check_target(services: Services, name: str, fields: VersionFields) -> Target:
    """Raises InvalidRequest, ModelNotFound, or NoEngine while no engine has described its base."""
    check_name(name)
    await check_grants(services, fields.tenants)
    if fields.preload.min_engines > 1:
        raise InvalidRequest("This server has one engine.", param="/preload/min_engines")
    if fields.base != services.served_model_name:
        raise ModelNotFound(f"This server serves no base of that name; it serves {services.served_model_name}.", param="/base")
    if services.engine.info is None:
        raise NoEngine("No engine is ready, so the adapter can't be validated yet.")
    return Target(name, services.engine.info.base, fields.tenants)


async def check_grants(services: Services, tenants: Sequence[str]) -> None:
    """Raises InvalidRequest for a tenant that does not exist, or `*` beside others."""
    if EVERYONE in tenants and len(tenants) > 1:
        raise InvalidRequest("`*` is every tenant and stands alone.", param="/tenants")
    for index, tenant_id in enumerate(tenants):
        try:
            if tenant_id != EVERYONE:
                await services.tenants.get(tenant_id)
        except NotFound:
            raise InvalidRequest("There is no such tenant.", param=f"/tenants/{index}") from None


async def register(services: Services, target: Target, files: AdapterFiles, source: str, sha256: str | None = None) -> Registered:
    """Validate, keep the bytes, then name them. Raises AdapterInvalid with the report."""
    report = await asyncio.to_thread(_validate, target.base, files, sha256)
    async with services.adapter_bytes.kept(report.digest, files.contents):
        return await services.registry.register(target.name, target.base.digest, report.digest, report, source, target.tenants)


def _validate(base: BaseDescription, files: AdapterFiles, sha256: str | None) -> RegistrationReport:
    config, tensors = files.contents
    if sha256 is not None and hashlib.sha256(tensors).hexdigest() != sha256.removeprefix("sha256:"):
        raise AdapterInvalid("adapter_model.safetensors has another SHA-256 than the one given.", param="/source/sha256")
    report = validate(config, tensors, base, added_tokens=files.added_tokens)
    raise_if_invalid(report)
    return report
