"""GET /health/live, /health/ready, /version and /metrics: the routes without a key."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from loramux.errors import StoreUnavailable
from loramux.gateway.deps import ServicesDep
from loramux.gateway.services import Services

router = APIRouter()

STORE_TIMEOUT_S = 1.0


@router.get("/health/live")
async def live() -> Response:
    return JSONResponse({"status": "live"})


@router.get("/health/ready")
async def ready(services: ServicesDep) -> Response:
    """200 when requests can be answered; 503 says which part is not ready."""
    parts = {"engine": services.engine.info is not None, "store": await _store_answers(services), "accepting": not services.draining}
    is_ready = all(parts.values())
    return JSONResponse({"status": "ready" if is_ready else "not ready", **parts}, status_code=200 if is_ready else 503)


@router.get("/version")
async def show_version(services: ServicesDep) -> Response:
    return JSONResponse({"version": version("loramux"), **_engine_facts(services)})


@router.get("/metrics")
async def metrics(services: ServicesDep) -> Response:
    return Response(services.metrics.expose(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _store_answers(services: Services) -> bool:
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            await services.store.ping()
    except (StoreUnavailable, TimeoutError):
        return False
    return True


def _engine_facts(services: Services) -> dict[str, Any]:
    info = services.engine.info
    if info is None:
        return {"engine": None}
    return {"engine": {"device": info.device, "kernels": info.kernels, "base_digest": info.base.digest}}
