"""`/admin/v1/adapters`."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from fastapi import Request, Response
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from loramux.adapters.added_tokens import ADDED_TOKENS_FILE
from loramux.adapters.contents import AdapterFiles, Contents
from loramux.adapters.peft_format import CONFIG_FILE, TENSORS_FILE
from loramux.adapters.peft_tensors import refuse_pickles
from loramux.adapters.registry import Registered
from loramux.adapters.source import LocalSource
from loramux.errors import AdapterInvalid, InvalidRequest, UnsupportedParameter
from loramux.gateway.admin.bodies import AliasTarget, Grants, NewVersion, Preload, VersionFields
from loramux.gateway.admin.operations import version_after
from loramux.gateway.admin.registration import check_grants, check_target, register
from loramux.gateway.admin.routing import admin_router
from loramux.gateway.admin.views import record_view, version_view
from loramux.gateway.deps import ServicesDep
from loramux.gateway.http_errors import from_validation
from loramux.gateway.services import Services

router = admin_router("/adapters")

_MIB = 1024 * 1024
_MAX_FIELD_BYTES = 64 * 1024


class _Registration(NamedTuple):
    registered: Registered
    preload: Preload


@router.post("/{name}/versions")
async def register_version(services: ServicesDep, request: Request, response: Response, name: str) -> dict[str, Any]:
    """A JSON body that names a source, or a multipart upload. 201, or 200 if the same content was there already; once it is loaded where
    the body asks for that."""
    multipart = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
    (version, created), preload = await (_from_upload if multipart else _from_source)(services, request, name)
    response.status_code = 201 if created else 200
    if preload.tier == "none":
        return version_view(services, version)
    return await version_after(services, response, "preload", version, services.placing.place(version, preload.tier, pinned=False))


@router.get("")
async def list_adapters(services: ServicesDep) -> dict[str, Any]:
    return {"data": [record_view(services, record) for record in await services.registry.list()]}


@router.get("/{name}")
async def get_adapter(services: ServicesDep, name: str) -> dict[str, Any]:
    return record_view(services, await services.registry.get(name))


@router.delete("/{name}", status_code=204)
async def delete_adapter(services: ServicesDep, name: str) -> None:
    await services.registry.delete_adapter(name)
    await services.adapter_bytes.free_after_change()


@router.get("/{name}/versions/{number}")
async def get_version(services: ServicesDep, name: str, number: int) -> dict[str, Any]:
    return version_view(services, await services.registry.get_version(name, number))


@router.delete("/{name}/versions/{number}", status_code=204)
async def delete_version(services: ServicesDep, name: str, number: int) -> None:
    await services.registry.delete_version(name, number)
    await services.adapter_bytes.free_after_change()


@router.put("/{name}/aliases/{alias}")
async def set_alias(services: ServicesDep, name: str, alias: str, body: AliasTarget) -> dict[str, Any]:
    await services.registry.set_alias(name, alias, body.version)
    return {"alias": alias, "version": body.version}


@router.put("/{name}/grants")
async def set_grants(services: ServicesDep, name: str, body: Grants) -> dict[str, Any]:
    await check_grants(services, body.tenants)
    await services.registry.set_grants(name, body.tenants)
    return {"tenants": sorted(set(body.tenants))}


async def _from_source(services: Services, request: Request, name: str) -> _Registration:
    try:
        body = NewVersion.model_validate_json(await request.body())
    except ValidationError as error:
        raise _with_body_paths(error) from None
    target = await check_target(services, name, body)
    source = LocalSource(services.settings.adapter_root, max_bytes=int(services.settings.max_adapter_mib * _MIB))
    found = await asyncio.to_thread(source.read, body.source.uri)
    return _Registration(await register(services, target, found, body.source.uri, body.source.sha256), body.preload)


async def _from_upload(services: Services, request: Request, name: str) -> _Registration:
    """Parts are spooled to disk as they arrive; the body limit bounds them all together."""
    async with request.form(max_files=4, max_fields=16, max_part_size=_MAX_FIELD_BYTES) as form:
        fields = _upload_fields(form)
        target = await check_target(services, name, fields)
        files = {key: part for key, part in form.multi_items() if isinstance(part, UploadFile)}
        refuse_pickles(set(files) | {part.filename or "" for part in files.values()})
        for missing in {CONFIG_FILE, TENSORS_FILE} - files.keys():
            raise AdapterInvalid(f"The upload has no file {missing}.", param=f"/{missing}")
        for other in files.keys() - {CONFIG_FILE, TENSORS_FILE, ADDED_TOKENS_FILE}:
            raise UnsupportedParameter(
                f"An upload has the files {CONFIG_FILE}, {TENSORS_FILE} and {ADDED_TOKENS_FILE} only.", param=f"/{other}"
            )
        contents = Contents(await files[CONFIG_FILE].read(), await files[TENSORS_FILE].read())
        added_tokens = await files[ADDED_TOKENS_FILE].read() if ADDED_TOKENS_FILE in files else None
    return _Registration(await register(services, target, AdapterFiles(contents, added_tokens), "upload"), fields.preload)


def _upload_fields(form: FormData) -> VersionFields:
    """The text parts; one that is JSON's list or object is read as such."""
    values: dict[str, Any] = {key: part for key, part in form.multi_items() if isinstance(part, str)}
    try:
        return VersionFields.model_validate({key: _part_value(part) for key, part in values.items()})
    except ValidationError as error:
        raise _with_body_paths(error) from None


def _part_value(part: str) -> Any:
    if not part.startswith(("[", "{")):
        return part
    try:
        return json.loads(part)
    except (ValueError, RecursionError):
        raise InvalidRequest("A part of the upload is not valid JSON.") from None


def _with_body_paths(error: ValidationError) -> InvalidRequest:
    errors = error.errors(include_input=False, include_url=False)
    return from_validation([{**each, "loc": ("body", *each["loc"])} for each in errors])
