from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loramux.errors import StartupFailed, StoreUnavailable
from loramux.gateway.runtime_dir import MAX_SOCKET_PATH_BYTES, make_runtime_dir
from loramux.gateway.store import embedded
from loramux.gateway.store.embedded import EmbeddedServer, lock_data_dir
from loramux.gateway.store.open import open_store
from loramux.gateway.tenancy.store import TenantStore


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    directory = make_runtime_dir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[int]:
    descriptor = lock_data_dir(tmp_path / "data")
    yield descriptor
    os.close(descriptor)


def test_a_runtime_directory_is_private_and_short(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert runtime_dir.stat().st_mode & 0o777 == 0o700
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    other = make_runtime_dir()
    assert len(os.fsencode(other / "engine-0.ipc")) <= MAX_SOCKET_PATH_BYTES
    other.rmdir()


async def test_what_was_written_is_there_after_a_restart(tmp_path: Path, runtime_dir: Path, lock: int) -> None:
    for expected in (None, "acme"):
        async with open_store("embedded", tmp_path / "data", runtime_dir, lock) as store:
            assert store.durable
            tenants = TenantStore(store)
            assert [tenant.id for tenant in await tenants.list()] == ([expected] if expected else [])
            if expected is None:
                await tenants.create("acme")
    settings = (tmp_path / "data" / "store").iterdir()
    assert {"appendonlydir", "valkey.log"} <= {path.name for path in settings}


async def test_a_change_that_was_answered_survives_kill_9(tmp_path: Path, runtime_dir: Path, lock: int) -> None:
    server = EmbeddedServer(tmp_path / "data" / "store", runtime_dir / "store.sock", lock)
    await server.start()
    async with open_store(server.url, tmp_path / "data", runtime_dir, lock) as store:
        await TenantStore(store).create("acme")
        assert (await store.client.config_get("appendfsync"))["appendfsync"] == "always"
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await TenantStore(store).get("acme")
        assert time.monotonic() - started < 2
        await server.stop()
        await server.start()
        assert (await TenantStore(store).get("acme")).id == "acme"
    await server.stop()


async def test_a_server_that_dies_is_started_again(tmp_path: Path, runtime_dir: Path, lock: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_RESTART_DELAYS_S", (0.05,))
    server = EmbeddedServer(tmp_path / "data" / "store", runtime_dir / "store.sock", lock)
    await server.start()
    first = server.pid
    watch = asyncio.create_task(server.watch())
    assert first is not None
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(10):
        while server.pid == first:
            await asyncio.sleep(0.02)
    watch.cancel()
    await server.stop()


async def test_a_start_that_is_cancelled_leaves_no_server(
    tmp_path: Path, runtime_dir: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(client: object) -> bool:
        return False

    monkeypatch.setattr(embedded, "_answers", never)
    opening = asyncio.create_task(open_store("embedded", tmp_path / "data", runtime_dir, lock).__aenter__())
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    async with asyncio.timeout(10):
        while not (started := set(children.read_text().split()) - before):
            await asyncio.sleep(0.01)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not started & set(children.read_text().split())


async def test_a_frozen_store_is_an_outage_soon(tmp_path: Path, runtime_dir: Path, lock: int) -> None:
    server = EmbeddedServer(tmp_path / "data" / "store", runtime_dir / "store.sock", lock)
    await server.start()
    async with open_store(server.url, tmp_path / "data", runtime_dir, lock) as store:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await store.ping()
        assert time.monotonic() - started < 2
        os.kill(server.pid, signal.SIGCONT)
    await server.stop()


async def test_a_store_that_can_not_start_says_why(tmp_path: Path, runtime_dir: Path, lock: int) -> None:
    manifest = tmp_path / "data" / "store" / "appendonlydir" / "appendonly.aof.manifest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("nonsense\n")
    with pytest.raises(StartupFailed, match="did not start"):
        async with open_store("embedded", tmp_path / "data", runtime_dir, lock):
            pass


async def test_a_store_elsewhere_that_does_not_answer(tmp_path: Path, runtime_dir: Path, lock: int) -> None:
    with pytest.raises(StartupFailed) as caught:
        async with open_store("redis://:hunter2@127.0.0.1:1/0", tmp_path, runtime_dir, lock):
            pass
    assert "127.0.0.1:1" in caught.value.message and "hunter2" not in caught.value.message


def test_the_data_directory_is_locked_until_the_last_child_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_LOCK_S", 0.1)
    descriptor = lock_data_dir(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    os.close(descriptor)
    with pytest.raises(StartupFailed, match="another server"):
        lock_data_dir(tmp_path)
    child.communicate(b"\n")
    os.close(lock_data_dir(tmp_path))


_PARENT = """
import asyncio, sys, os
from pathlib import Path
from loramux.gateway.store.embedded import EmbeddedServer, lock_data_dir
async def main():
    data = Path(sys.argv[1])
    server = EmbeddedServer(data / "store", Path(sys.argv[2]) / "store.sock", lock_data_dir(data))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_server_dies_with_its_parent(tmp_path: Path, runtime_dir: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path / "data"), str(runtime_dir)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert int(parent.stdout.readline()) > 0
    parent.kill()
    parent.wait()
    parent.stdout.close()
    os.close(lock_data_dir(tmp_path / "data"))  # the server held it too
