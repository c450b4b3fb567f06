"""The engine's loop around a core without a model, as a process and as a thread, and clients of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from loramux.adapters.contents import ContentStore
from loramux.engine.adapter_fetch import AdapterFetch
from loramux.engine.client import EngineClient, EngineGeneration, FindContents
from loramux.engine.config import EngineConfig
from loramux.engine.server import EngineServer, Wake, bind
from loramux.engine.types import TokenDelta
from tests.engine.fake_core import FakeCore

ROOT = Path(__file__).parents[2]


@dataclass
class EngineProcess:
    endpoint: str
    popen: subprocess.Popen[bytes]
    log_path: Path

    def log(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.log_path.read_bytes().splitlines()]

    def wait(self) -> int:
        return self.popen.wait(timeout=20)


@contextmanager
def engine_process(directory: Path, model: str = "fake", endpoint: str = "") -> Iterator[EngineProcess]:
    """`python -m tests.engine.fake_core`, killed at the end if it still runs."""
    endpoint = endpoint or f"ipc://{directory}/engine"
    config = EngineConfig(model=model, endpoint=endpoint, data_dir=str(directory / "data"))
    log_path = directory / "engine.log"
    with log_path.open("wb") as log:
        popen = subprocess.Popen([sys.executable, "-m", "tests.engine.fake_core"], stdin=subprocess.PIPE, stderr=log, cwd=ROOT)
    assert popen.stdin is not None
    popen.stdin.write(msgspec.json.encode(config))
    popen.stdin.close()
    try:
        yield EngineProcess(endpoint, popen, log_path)
    finally:
        popen.kill()
        popen.wait()


@dataclass
class EngineThread:
    endpoint: str
    core: FakeCore
    server: EngineServer
    contents: ContentStore
    exit_codes: list[int]


@contextmanager
def engine_thread(directory: Path) -> Iterator[EngineThread]:
    endpoint = f"ipc://{directory}/engine"
    wake = Wake()
    contents = ContentStore(directory / "adapters")
    fetch = AdapterFetch(contents, wake)
    core = FakeCore(fetch.fetch, wake)
    with zmq.Context() as context, bind(context, endpoint) as socket:
        engine = EngineThread(endpoint, core, EngineServer(socket, core, fetch, wake), contents, [])
        thread = threading.Thread(target=lambda: engine.exit_codes.append(engine.server.run()))
        thread.start()
        try:
            yield engine
        finally:
            engine.server.stop()
            thread.join()
            fetch.close()
            core.close()


def has_nothing(digest: str) -> None:
    return None


@asynccontextmanager
async def connected(endpoint: str, contents: FindContents = has_nothing, **options: float) -> AsyncIterator[EngineClient]:
    """A client that has been welcomed. At the end nothing is in flight, and no task is left."""
    before = asyncio.all_tasks()
    client = EngineClient(endpoint, contents, **options)
    await client.start()
    try:
        await until(lambda: client.info is not None)
        yield client
    finally:
        await client.close()
    assert client.num_in_flight == 0
    assert asyncio.all_tasks() <= before


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def collect(generation: EngineGeneration) -> list[TokenDelta]:
    async with asyncio.timeout(20):
        return [delta async for delta in generation.deltas()]
