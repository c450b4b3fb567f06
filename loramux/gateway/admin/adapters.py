"""`/admin/v1/adapters`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from fastapi import Request, Response
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from loramux.adapters.contents import Contents
from loramux.adapters.peft_format import CONFIG_FILE, TENSORS_FILE
from loramux.adapters.peft_tensors import refuse_pickles
from loramux.adapters.registry import AdapterRecord, Registered
from loramux.adapters.source import LocalSource
from loramux.adapters.types import AdapterVersion
from loramux.errors import AdapterInvalid, InvalidRequest, UnsupportedParameter
from loramux.gateway.admin.bodies import AliasTarget, Grants, NewVersion, VersionFields
from loramux.gateway.admin.registration import check_grants, check_target, register
from loramux.gateway.admin.routing import admin_router
from loramux.gateway.deps import ServicesDep
from loramux.gateway.http_errors import from_validation
from loramux.gateway.services import Services

router = admin_router("/adapters")

_MIB = 1024 * 1024
_MAX_FIELD_BYTES = 64 * 1024


@router.post("/{name}/versions", status_code=201)
async def register_version(services: ServicesDep, request: Request, response: Response, name: str) -> dict[str, Any]:
    """A JSON body that names a source, or a multipart upload. 200 in place of 201 if the same content was there already."""
    multipart = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
    registered = await (_from_upload if multipart else _from_source)(services, request, name)
    if not registered.created:
        response.status_code = 200
    return _version(registered.version)


@router.get("")
async def list_adapters(services: ServicesDep) -> dict[str, Any]:
    return {"data": [_record(record) for record in await services.registry.list()]}


@router.get("/{name}")
async def get_adapter(services: ServicesDep, name: str) -> dict[str, Any]:
    return _record(await services.registry.get(name))


@router.delete("/{name}", status_code=204)
async def delete_adapter(services: ServicesDep, name: str) -> None:
    await services.registry.delete_adapter(name)
    await services.adapter_bytes.free_after_deletion()


@router.get("/{name}/versions/{number}")
async def get_version(services: ServicesDep, name: str, number: int) -> dict[str, Any]:
    return _version(await services.registry.get_version(name, number))


@router.delete("/{name}/versions/{number}", status_code=204)
async def delete_version(services: ServicesDep, name: str, number: int) -> None:
    await services.registry.delete_version(name, number)
    await services.adapter_bytes.free_after_deletion()


@router.put("/{name}/aliases/{alias}")
async def set_alias(services: ServicesDep, name: str, alias: str, body: AliasTarget) -> dict[str, Any]:
    await services.registry.set_alias(name, alias, body.version)
    return {"alias": alias, "version": body.version}


@router.put("/{name}/grants")
async def set_grants(services: ServicesDep, name: str, body: Grants) -> dict[str, Any]:
    await check_grants(services, body.tenants)
    await services.registry.set_grants(name, body.tenants)
    return {"tenants": sorted(set(body.tenants))}


async def _from_source(services: Services, request: Request, name: str) -> Registered:
    try:
        body = NewVersion.model_validate_json(await request.body())
    except ValidationError as error:
        raise _with_body_paths(error) from None
    target = await check_target(services, name, body.base, body.tenants)
    source = LocalSource(services.settings.adapter_root, max_bytes=int(services.settings.max_adapter_mib * _MIB))
    contents = await asyncio.to_thread(source.read, body.source.uri)
    return await register(services, target, contents, body.source.uri, body.source.sha256)


async def _from_upload(services: Services, request: Request, name: str) -> Registered:
    """Parts are spooled to disk as they arrive; the body limit bounds them all together."""
    async with request.form(max_files=4, max_fields=16, max_part_size=_MAX_FIELD_BYTES) as form:
        fields = _upload_fields(form)
        target = await check_target(services, name, fields.base, fields.tenants)
        files = {key: part for key, part in form.multi_items() if isinstance(part, UploadFile)}
        refuse_pickles(set(files) | {part.filename or "" for part in files.values()})
        for missing in {CONFIG_FILE, TENSORS_FILE} - files.keys():
            raise AdapterInvalid(f"The upload has no file {missing}.", param=f"/{missing}")
        for other in files.keys() - {CONFIG_FILE, TENSORS_FILE}:
            raise UnsupportedParameter("An upload has the files adapter_config.json and adapter_model.safetensors only.", param=f"/{other}")
        contents = Contents(await files[CONFIG_FILE].read(), await files[TENSORS_FILE].read())
    return await register(services, target, contents, "upload")


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


def _version(version: AdapterVersion) -> dict[str, Any]:
    return {"id": version.id, **msgspec.to_builtins(version)}


def _record(record: AdapterRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "aliases": record.aliases,
        "tenants": list(record.grants),
        "versions": [_version(version) for version in record.versions],
    }
