"""The application: routes, error handlers and middleware around one `Services`."""

from __future__ import annotations

import re

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from loramux.gateway import health
from loramux.gateway.admin import adapters, engines, keys, operations, placements, tenants
from loramux.gateway.http_errors import install_error_handlers
from loramux.gateway.metrics import ObserveRequests
from loramux.gateway.middleware import BodyLimit, RequestContext
from loramux.gateway.openai import routes
from loramux.gateway.services import Services

_MIB = 1024 * 1024
_UPLOAD_PATH = re.compile(r"/admin/v1/adapters/[^/]+/versions")


def create_routes(services: Services) -> FastAPI:
    """Every route, with its errors in the contract's form, but without middleware."""
    app = FastAPI(title="loramux", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.services = services
    for module in (health, routes, tenants, keys, adapters, placements, engines, operations):
        app.include_router(module.router)
    install_error_handlers(app)
    return app


def create_app(services: Services) -> ASGIApp:
    """The application as it is served."""
    settings = services.settings

    def body_limit_bytes(scope: Scope) -> int:
        multipart = Headers(scope=scope).get("content-type", "").lower().startswith("multipart/form-data")
        upload = multipart and scope["method"] == "POST" and _UPLOAD_PATH.fullmatch(scope["path"]) is not None
        return int((settings.max_adapter_mib if upload else settings.max_body_mib) * _MIB)

    app: ASGIApp = BodyLimit(create_routes(services), body_limit_bytes)
    if settings.cors_origin:
        app = CORSMiddleware(app, allow_origins=settings.cors_origin, allow_methods=["*"], allow_headers=["*"])
    return ObserveRequests(RequestContext(app), services.metrics)
