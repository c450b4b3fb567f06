"""What routes ask for, as `Annotated` aliases. Every OpenAI route takes a principal; admin routes are guarded by their router."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from loramux.errors import AuthenticationFailed, ScopeMissing
from loramux.gateway.services import Services
from loramux.gateway.tenancy.types import Principal


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(services_of)]


def bearer_key(request: Request) -> str:
    """The key of the Authorization header. Raises AuthenticationFailed, never repeating what was sent."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise AuthenticationFailed("An API key is needed in the header `Authorization: Bearer <key>`.")
    return key.strip()


async def authorise(request: Request, scope: str) -> Principal:
    """The principal, if its key carries `scope`.

    Raises AuthenticationFailed, ScopeMissing, or StoreUnavailable: without the store nobody gets in.
    """
    services = services_of(request)
    if scope == "infer" and services.settings.no_auth:
        principal = await services.tenants.open_principal()
    else:
        principal = await services.tenants.authenticate(bearer_key(request))
    request.state.tenant_id, request.state.key_id = principal.tenant_id, principal.key_id
    if scope not in principal.scopes:
        raise ScopeMissing(f"This key does not have the scope {scope!r}.")
    return principal


async def may_infer(request: Request) -> Principal:
    return await authorise(request, "infer")


InferPrincipal = Annotated[Principal, Depends(may_infer)]
