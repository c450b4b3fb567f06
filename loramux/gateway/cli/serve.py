"""`loramux serve`: puts the gateway together, runs it until SIGTERM or SIGINT, and takes it apart again."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import uvicorn
import uvloop

from loramux.adapters.contents import ContentStore
from loramux.adapters.registry import Registry
from loramux.engine.checkpoint import Checkpoint, open_checkpoint
from loramux.engine.client import EngineClient
from loramux.engine.config import EngineConfig
from loramux.engine.json_log import log_to_stderr
from loramux.errors import InvalidRequest, NotFound, StartupFailed, StoreUnavailable
from loramux.gateway.adapter_bytes import AdapterBytes
from loramux.gateway.app import create_app
from loramux.gateway.cli.stopping import Stopped, StopSignals, stopped_by_signals
from loramux.gateway.fleet.supervisor import Supervisor
from loramux.gateway.in_flight import InFlight
from loramux.gateway.metrics import Metrics
from loramux.gateway.operations import Operations
from loramux.gateway.placing import Placing
from loramux.gateway.runtime_dir import make_runtime_dir
from loramux.gateway.services import Services
from loramux.gateway.settings import Settings, check_exposure
from loramux.gateway.store.embedded import lock_data_dir
from loramux.gateway.store.open import open_store
from loramux.gateway.tenancy.store import TenantStore
from loramux.gateway.tokenizer import ChatTokenizer

log = logging.getLogger("loramux.gateway")

_KEEP_ALIVE_S = 75
_BACKLOG = 2048
_LAST_WORDS_S = 2.0
"""How long a second signal leaves to streams for their error event; a client that reads nothing is then cut off."""

T = TypeVar("T")


def run_server(settings: Settings) -> int:
    """Serve until told to stop; the exit code. A start that fails is one line on standard error and the code 1."""
    log_to_stderr()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        check_exposure(settings)
        with stopped_by_signals(), _ground(settings) as ground, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, ground))
    except Stopped:
        return 0
    except StartupFailed as error:
        return _failed(error.message)
    except StoreUnavailable as error:
        return _failed(f"{error.message} See to the store, or give another --store-url")
    except OSError as error:
        return _failed(f"{error.filename or 'the system'}: {error.strerror or error}; see to it, or give another --data-dir")
    return 0


def _failed(message: str) -> int:
    print(f"loramux: {' '.join(message.split())}", file=sys.stderr)
    return 1


class _Server(uvicorn.Server):
    """uvicorn, with signals left to us: its own handling ends the process by the signal instead of with 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Ground(NamedTuple):
    """What a server stands on, found or made without an event loop, so that a signal can end it at any point."""

    listener: socket.socket
    """Bound, so that nobody else has the port; not open to connections before there is something to answer them."""
    data_dir: Path
    lock: int
    runtime_dir: Path
    checkpoint: Checkpoint


@contextmanager
def _ground(settings: Settings) -> Iterator[_Ground]:
    with ExitStack() as stack:
        listener = stack.enter_context(_bound(settings.host, settings.port))
        data_dir = settings.data_dir.expanduser().absolute()
        lock = lock_data_dir(data_dir)
        stack.callback(os.close, lock)
        runtime_dir = make_runtime_dir()
        stack.callback(shutil.rmtree, runtime_dir, ignore_errors=True)
        yield _Ground(listener, data_dir, lock, runtime_dir, open_checkpoint(settings.model, data_dir / "checkpoints"))


async def _serve(settings: Settings, ground: _Ground) -> None:
    signals = StopSignals()
    async with AsyncExitStack() as stack:
        stopping = stack.enter_context(_cancelled_at_the_end(signals.first.wait()))
        opening = asyncio.create_task(stack.enter_async_context(_services(settings, ground)))
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            await _cancel(opening)
            return
        services, supervisor = opening.result()
        server = _Server(_server_config(services))
        _open(ground.listener)
        starting = asyncio.create_task(supervisor.start())
        serving = asyncio.create_task(server.serve(sockets=[ground.listener]))
        watching: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({starting, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.cancelled():
                starting.result()
                _log_start(services, ground.listener)
                watching = stack.enter_context(_cancelled_at_the_end(supervisor.watch()))
                await asyncio.wait({serving, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
                _raise_what_broke(watching)
            _raise_what_broke(serving)
        finally:
            services.draining = True
            await _cancel(starting)
            await _drain(server, serving, signals.second, lambda: _abort(supervisor, watching))


async def _drain(server: _Server, serving: asyncio.Task[None], hurry: asyncio.Event, abort: Callable[[], Awaitable[None]]) -> None:
    """Let what is in flight end, or, once told to hurry, `abort` it and give its last words a moment to leave."""
    server.should_exit = True
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait({serving, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        log.warning("told again to stop: aborting what is in flight")
        await abort()
        await asyncio.wait({serving}, timeout=_LAST_WORDS_S)
        server.force_exit = True
        for task in set(server.server_state.tasks):
            task.cancel()
    await _cancel(hurrying)
    await asyncio.gather(serving, return_exceptions=True)


async def _abort(supervisor: Supervisor, watching: asyncio.Task[None] | None) -> None:
    if watching is not None:
        await _cancel(watching)
    await supervisor.abandon()


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _raise_what_broke(task: asyncio.Task[None]) -> None:
    """Neither the server nor the watch ends by itself unless it failed."""
    if task.done():
        task.result()


@contextmanager
def _cancelled_at_the_end(work: Coroutine[Any, Any, T]) -> Iterator[asyncio.Task[T]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _port_taken_named(host, port):
            listener.bind((host, port))
        listener.setblocking(False)
        yield listener


def _open(listener: socket.socket) -> None:
    """Also what may find another server on the port: one that was bound to it at the same time."""
    host, port = listener.getsockname()[:2]
    with _port_taken_named(host, port):
        listener.listen(_BACKLOG)


@contextmanager
def _port_taken_named(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartupFailed(f"can't listen on {host} port {port}: {error.strerror or error}; give another --host or --port") from None


@asynccontextmanager
async def _services(settings: Settings, ground: _Ground) -> AsyncIterator[tuple[Services, Supervisor]]:
    """Every part but a running engine, in the order in which each needs the ones before."""
    async with AsyncExitStack() as stack:
        data_dir, checkpoint = ground.data_dir, ground.checkpoint
        store = await stack.enter_async_context(open_store(settings.store_url, data_dir, ground.runtime_dir, ground.lock))
        tenants = TenantStore(store)
        await _prepare_tenants(tenants, settings)
        registry = Registry(store.client, durable=store.durable)
        contents = ContentStore(data_dir / "adapters")
        endpoint = f"ipc://{ground.runtime_dir / 'engine-0.ipc'}"
        engine = EngineClient(endpoint, lambda digest: _find_contents(contents, digest))
        metrics = Metrics()
        metrics.watch_engine(engine)
        in_flight, operations = InFlight(metrics), Operations()
        adapter_bytes = AdapterBytes(contents, registry, engine, in_flight, data_dir, settings.store_url)
        await adapter_bytes.free()
        await engine.start()
        stack.push_async_callback(engine.close)
        placing = Placing(engine, registry, adapter_bytes)
        await stack.enter_async_context(placing.kept())
        stack.push_async_callback(operations.close)
        services = Services(
            settings=settings,
            store=store,
            tenants=tenants,
            registry=registry,
            contents=contents,
            adapter_bytes=adapter_bytes,
            placing=placing,
            engine=engine,
            tokenizer=ChatTokenizer(checkpoint.files_dir),
            metrics=metrics,
            in_flight=in_flight,
            operations=operations,
            served_model_name=settings.served_model_name or checkpoint.name,
        )
        supervisor = Supervisor(_engine_config(settings, endpoint, data_dir), engine)
        stack.push_async_callback(supervisor.stop)
        yield services, supervisor


async def _prepare_tenants(tenants: TenantStore, settings: Settings) -> None:
    try:
        made = await tenants.ensure_admin_key(os.environ.get("LORAMUX_ADMIN_KEY") or None)
    except InvalidRequest as error:
        raise StartupFailed(error.message) from None
    if made is not None:
        print(f"Admin key, shown only this once: {made}", flush=True)
    if settings.no_auth:
        await tenants.ensure_open_tenant()


def _find_contents(contents: ContentStore, digest: str) -> tuple[bytes, bytes] | None:
    try:
        found = contents.get(digest)
    except NotFound:
        return None
    return found.config, found.tensors


def _engine_config(settings: Settings, endpoint: str, data_dir: Path) -> EngineConfig:
    """The engine on this host reads adapters from the gateway's own directory, which may be shared."""
    return EngineConfig(
        model=settings.model,
        endpoint=endpoint,
        data_dir=str(data_dir),
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        kv_cache_gib=settings.kv_cache_gib,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
        lora_host_gib=settings.lora_host_gib,
        lora_memory_gib=settings.lora_memory_gib,
        num_threads=settings.num_threads,
    )


def _server_config(services: Services) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(services),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(services.settings.request_timeout),
    )


def _log_start(services: Services, listener: socket.socket) -> None:
    info = services.engine.info
    host, port = listener.getsockname()[:2]
    fields = {
        "url": f"http://{host}:{port}",
        "model": services.served_model_name,
        "device": info.device if info else None,
        "kernels": info.kernels if info else None,
        "kv_capacity_tokens": info.kv_capacity_tokens if info else None,
        "max_model_len": info.base.max_model_len if info else None,
    }
    log.info("serving", extra={"fields": fields})
