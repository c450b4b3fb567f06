from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from loramux.engine.config import EngineConfig
from loramux.engine.types import EngineInfo
from loramux.errors import StartupFailed
from loramux.gateway.fleet import supervisor as supervisor_module
from loramux.gateway.fleet.supervisor import Supervisor
from tests.fakes import base_description, engine_info

_CHILD = """
import json, pathlib, signal, sys, time
config = json.load(sys.stdin)
runs = pathlib.Path(config["data_dir"]) / "runs"
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
plan = pathlib.Path(config["model"]).read_text().split()
step = plan[min(len(runs.read_text()), len(plan)) - 1]
if step == "refuse":
    print(json.dumps({"event": "startup_failed", "message": "no weights at all"}), file=sys.stderr)
    sys.exit(1)
if step == "bug":
    print(json.dumps({"event": "startup_failed", "message": "it could not", "exception": {"stack": ["build x.py:7"]}}), file=sys.stderr)
    sys.exit(1)
if step == "crash":
    print("Traceback: boom", file=sys.stderr)
    sys.exit(3)
if step == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(config["endpoint"]).write_text(str(len(runs.read_text())))
time.sleep(60)
"""


class FileClient:
    """Ready when the child has written its endpoint file; implements what a supervisor needs of a client."""

    def __init__(self, endpoint: Path) -> None:
        self.endpoint = endpoint
        self.losses: list[str] = []
        self.asked_to_stop = False

    @property
    def info(self) -> EngineInfo | None:
        return engine_info(base_description(10, ())) if self.endpoint.exists() else None

    def lost(self, reason: str) -> None:
        self.losses.append(reason)
        self.endpoint.unlink(missing_ok=True)

    def shut_down(self) -> None:
        self.asked_to_stop = True


@asynccontextmanager
async def _supervised(directory: Path, plan: str) -> AsyncIterator[tuple[Supervisor, FileClient]]:
    (directory / "plan").write_text(plan)
    client = FileClient(directory / "endpoint")
    config = EngineConfig(model=str(directory / "plan"), endpoint=str(client.endpoint), data_dir=str(directory))
    supervisor = Supervisor(config, client, [sys.executable, "-c", _CHILD])
    try:
        yield supervisor, client
    finally:
        await supervisor.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_BACKOFF_S", (0.01, 0.02))
    monkeypatch.setattr(supervisor_module, "STOP_S", 0.2)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_refusal_at_the_first_start_is_the_servers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with _supervised(tmp_path, "refuse") as (supervisor, _):
        with pytest.raises(StartupFailed, match="no weights at all"):
            await supervisor.start()
    assert (tmp_path / "runs").read_text() == "x"
    assert capfd.readouterr().err == ""


async def test_an_unexpected_failure_leaves_its_stack_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with _supervised(tmp_path, "bug") as (supervisor, _):
        with pytest.raises(StartupFailed, match="it could not"):
            await supervisor.start()
    assert json.loads(capfd.readouterr().err)["exception"] == {"stack": ["build x.py:7"]}


async def test_an_engine_that_is_abandoned_ends_at_once_with_what_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_S", 30.0)
    async with _supervised(tmp_path, "ok") as (supervisor, client):
        await supervisor.start()
        pid = supervisor.pid
        async with asyncio.timeout(5):
            await supervisor.abandon()
        assert client.losses == ["the gateway is stopping"] and not client.asked_to_stop
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_crash_at_the_first_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with _supervised(tmp_path, "crash") as (supervisor, _):
        with pytest.raises(StartupFailed, match="code 3"):
            await supervisor.start()
    assert "boom" in capfd.readouterr().err


async def test_an_engine_that_dies_is_lost_then_restarted_through_failures(tmp_path: Path) -> None:
    async with _supervised(tmp_path, "ok refuse crash ok") as (supervisor, client):
        await supervisor.start()
        first = supervisor.pid
        watch = asyncio.create_task(supervisor.watch())
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await _until(lambda: client.endpoint.exists() and client.endpoint.read_text() == "4")
        assert supervisor.pid != first and len(client.losses) == 3
        watch.cancel()
    assert client.asked_to_stop


async def test_an_engine_that_hangs_is_ended_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_SILENT_S", 0.3)
    async with _supervised(tmp_path, "ok ok") as (supervisor, client):
        await supervisor.start()
        first = supervisor.pid
        watch = asyncio.create_task(supervisor.watch())
        await asyncio.sleep(0.5)
        assert supervisor.pid == first
        client.endpoint.unlink()
        await _until(lambda: client.endpoint.exists() and client.endpoint.read_text() == "2")
        assert supervisor.pid != first and len(client.losses) == 1
        watch.cancel()


async def test_stopping_ends_even_a_stubborn_engine(tmp_path: Path) -> None:
    async with _supervised(tmp_path, "stubborn") as (supervisor, _):
        await supervisor.start()
        pid = supervisor.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_settings_reach_the_engine_whole() -> None:
    config = EngineConfig(model="m", endpoint="ipc://x", data_dir="d", num_threads=2)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    assert json.loads(msgspec.json.encode(config))["max_loras"] == 8
