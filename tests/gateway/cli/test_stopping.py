"""A server told to stop before it is ready."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import free_port

SOON_S = 2.0
"""About a second, on a machine that has other things to do."""
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@contextmanager
def _starting(model: Path, directory: Path, port: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "loramux", "serve", "--model", str(model), "--port", str(port), "--device", "cpu", *flags]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--data-dir", str(directory / "data")], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _children(process: subprocess.Popen[bytes]) -> dict[int, str]:
    found = {}
    for pid in map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
        with suppress(FileNotFoundError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text()
    return found


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def _ends_well(process: subprocess.Popen[bytes], number: int) -> None:
    children, started = _children(process), time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=30) == 0
    assert time.monotonic() - started < SOON_S
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


@SIGNALS
def test_while_the_checkpoint_is_converted(demo_model: Path, tmp_path: Path, number: int) -> None:
    port = free_port()
    with _starting(demo_model, tmp_path, port) as process:
        _until(lambda: any("convert_gguf" in command for command in _children(process).values()))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health/live")
        _ends_well(process, number)
    assert list((tmp_path / "data" / "checkpoints" / "gguf").iterdir()) == []
    assert (tmp_path / "log").read_text() == ""


@SIGNALS
def test_while_the_store_does_not_answer(tiny_llama: Path, tmp_path: Path, number: int) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as store:
        url = f"redis://127.0.0.1:{store.getsockname()[1]}"
        with _starting(tiny_llama, tmp_path, port, "--store-url", url) as process:
            store.settimeout(60)
            with store.accept()[0]:
                with pytest.raises(httpx.ConnectError):
                    httpx.get(f"http://127.0.0.1:{port}/health/live")
                _ends_well(process, number)


@SIGNALS
def test_while_the_engine_loads(tiny_llama: Path, tmp_path: Path, number: int) -> None:
    """The listener is open by now: what is asked is answered."""
    url = f"http://127.0.0.1:{free_port()}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/health/live", timeout=5).status_code == 200
        except httpx.ConnectError:
            return False

    with _starting(tiny_llama, tmp_path, int(url.rpartition(":")[2])) as process:
        _until(answers)
        assert httpx.get(f"{url}/health/ready", timeout=5).status_code == 503
        assert sorted("engine.process" in command for command in _children(process).values()) == [False, True]
        _ends_well(process, number)
