"""The engine process and its loop, over real sockets, around a core without a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zmq
from safetensors.numpy import save

from loramux.adapters.contents import ContentStore
from loramux.adapters.identity import content_digest
from loramux.engine.adapter_fetch import AdapterFetch
from loramux.engine.protocol import AdapterBytes, Hello, NeedAdapter, StepOutput, Submit, Welcome, decode_to_gateway, encode
from loramux.engine.types import RequestEnd
from loramux.errors import AdapterLoading, EngineFailed, NoEngine
from tests.engine.engine_process import ROOT, collect, connected, engine_process, engine_thread, until
from tests.engine.fake_core import BROKEN, make_request

CONFIG = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}).encode()
TENSORS = save(
    {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": np.ones(shape, dtype=np.float32)
        for side, shape in (("A", (2, 16)), ("B", (16, 2)))
    }
)
DIGEST = content_digest(CONFIG, TENSORS)
LOG_KEYS = {"time", "level", "logger", "message"}


async def test_serves_and_shuts_down(tmp_path: Path) -> None:
    with engine_process(tmp_path) as engine:
        async with connected(engine.endpoint) as client:
            assert len(await collect(client.submit(make_request("a", max_tokens=3)))) == 3
            running = client.submit(make_request("b", max_tokens=10**9))
            await running.admitted()
            client.shut_down()
            end = await running.ended()
            assert end.end == "aborted"
            assert end.num_completion_tokens > 0
            assert await asyncio.to_thread(engine.wait) == 0
        assert all(line.keys() >= LOG_KEYS for line in engine.log())


async def test_sigterm_ends_requests_and_exits_0(tmp_path: Path) -> None:
    with engine_process(tmp_path) as engine:
        async with connected(engine.endpoint) as client:
            running = client.submit(make_request("b", max_tokens=10**9))
            await running.admitted()
            engine.popen.send_signal(signal.SIGINT)
            engine.popen.send_signal(signal.SIGTERM)
            assert (await running.ended()).end == "aborted"
            assert await asyncio.to_thread(engine.wait) == 0


async def test_a_step_that_breaks_fails_requests_and_exits_1(tmp_path: Path) -> None:
    with engine_process(tmp_path) as engine:
        async with connected(engine.endpoint) as client:
            running = client.submit(make_request("a", max_tokens=10**9))
            await running.admitted()
            broken = client.submit(make_request("b", prompt=(BROKEN, 77_777)))
            for generation in (running, broken):
                with pytest.raises(EngineFailed):
                    await collect(generation)
            assert (await running.ended()).num_completion_tokens > 0
            assert await asyncio.to_thread(engine.wait) == 1
        (failure,) = [line for line in engine.log() if line["level"] == "critical"]
        assert failure["exception"]["type"] == "RuntimeError"
        assert any("_advance" in frame for frame in failure["exception"]["stack"])
        assert not any(secret in engine.log_path.read_text() for secret in ("77777", "the-secret-salt"))


async def test_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    with engine_process(tmp_path) as first:
        async with connected(first.endpoint) as client:
            running = client.submit(make_request("a", max_tokens=10**9))
            await running.admitted()
            first.popen.kill()
            first.wait()
            client.lost("the engine process died")
            with pytest.raises(NoEngine):
                await collect(running)
            with engine_process(tmp_path, endpoint=first.endpoint):
                await until(lambda: client.info is not None)
                assert len(await collect(client.submit(make_request("b", max_tokens=3)))) == 3


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    for options, message in (
        ({"model": "missing"}, "no model at 'missing'; give --model a directory"),
        ({"endpoint": "ipc:///nowhere/at/all"}, "the engine can't bind ipc:///nowhere/at/all: No such file or directory"),
    ):
        with engine_process(tmp_path, **options) as engine:
            assert engine.wait() == 1
            last = engine.log()[-1]
            assert (last["event"], last["message"]) == ("startup_failed", message)


def test_dies_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed takes the engine with it."""
    config = json.dumps({"model": "fake", "endpoint": f"ipc://{tmp_path}/engine", "data_dir": str(tmp_path)})
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'tests.engine.fake_core'], stdin=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        f"child.stdin.write({config.encode()!r}); child.stdin.close()\n"
        "child.stderr.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_adapter_bytes_come_from_a_gateway_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def contents(digest: str) -> tuple[bytes, bytes] | None:
        asked.append(digest)
        return CONFIG, TENSORS

    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint, contents) as client:
            for index in range(3):
                deltas = await collect(client.submit(make_request(f"a{index}", adapter=DIGEST)))
                assert deltas[0].token_ids == (len(CONFIG) + len(TENSORS),)
        assert asked == [DIGEST]
        assert engine.contents.verify(DIGEST)


async def test_the_next_gateway_is_asked_where_one_has_no_bytes(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint) as poor, connected(engine.endpoint, lambda _: (CONFIG, TENSORS)):
            assert len(await collect(poor.submit(make_request("a", adapter=DIGEST)))) == 5


async def test_a_base_request_does_not_wait_for_an_adapter(tmp_path: Path) -> None:
    def slow(digest: str) -> None:
        time.sleep(0.5)

    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint, slow) as client:
            waiting = client.submit(make_request("a", adapter=DIGEST))
            assert len(await collect(client.submit(make_request("b")))) == 5
            assert client.num_in_flight == 1
            with pytest.raises(AdapterLoading):
                await waiting.admitted()


def _fails(digest: str) -> None:
    raise OSError("disk")


@pytest.mark.parametrize(
    ("contents", "error"),
    [
        (lambda _: None, AdapterLoading),
        (_fails, AdapterLoading),
        (lambda _: (CONFIG, TENSORS + b"x"), EngineFailed),
        (lambda _: (b"", b""), EngineFailed),
    ],
)
async def test_missing_and_wrong_adapter_bytes_fail_the_request_alone(tmp_path: Path, contents, error: type[Exception]) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint, contents) as client:
            with pytest.raises(error):
                await client.submit(make_request("a", adapter=DIGEST)).admitted()
            assert len(await collect(client.submit(make_request("b")))) == 5
        assert not engine.contents.has(DIGEST)


class RawGateway:
    """A gateway's end of the socket, worked by hand."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.connect(endpoint)

    def send(self, *messages: object) -> None:
        for message in messages:
            self._socket.send(message if isinstance(message, bytes) else encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self, kind: type) -> object:
        while True:
            message = decode_to_gateway(self._socket.recv())
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def test_malformed_messages_are_dropped(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        gateway = RawGateway(engine.endpoint)
        gateway.send(b"", b"\xc1", b"\x91" * 100_000, encode({"type": "Submit"}), encode({"type": "Welcome"}), os.urandom(1000))
        gateway.send_frames(b"one", b"two")
        gateway.send(AdapterBytes(DIGEST, b"never asked for"), Hello("g"))
        assert isinstance(gateway.receive(Welcome), Welcome)
        gateway.send(Submit(make_request("a", max_tokens=10**6)), Submit(make_request("a", max_tokens=1)))
        assert gateway.receive(StepOutput).admitted == ("a",)
        gateway.close()
    assert engine.exit_codes == [0]


def test_a_heartbeat_is_not_welcomed_again(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        gateway = RawGateway(engine.endpoint)
        gateway.send(Hello("g"), Hello("g"), Hello("g"), Submit(make_request("a", max_tokens=1)))
        kinds = [type(gateway.receive(object)) for _ in range(2)]
        assert kinds == [Welcome, StepOutput]
        gateway.close()


@pytest.mark.parametrize("how", ["silent", "gone", "connected anew"])
def test_requests_of_a_gateway_that_is_gone_are_aborted(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "silent":
        monkeypatch.setattr("loramux.engine.server.GATEWAY_TIMEOUT_S", 0.3)
    with engine_thread(tmp_path) as engine:
        gateway = RawGateway(engine.endpoint)
        gateway.send(Hello("g"), Submit(make_request("a", max_tokens=10**9)))
        assert gateway.receive(StepOutput).admitted == ("a",)
        again = RawGateway(engine.endpoint)
        if how == "gone":
            gateway.close()
        elif how == "connected anew":
            again.send(Hello("g"))
            again.receive(Welcome)
        deadline = time.monotonic() + 10
        while engine.core.has_work():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if how == "silent":
            gateway.send(Hello("g"))
            gateway.receive(Welcome)
        for each in (gateway, again):
            each.close()


def test_two_questions_for_a_gateway_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first finds it unreachable; the engine drops the second and goes on."""
    monkeypatch.setattr("loramux.engine.server.STATS_S", 3.0)
    digests = [DIGEST, "sha256:" + "0" * 64]
    with engine_thread(tmp_path) as engine:
        gone, poor = RawGateway(engine.endpoint), RawGateway(engine.endpoint)
        for gateway, gateway_id in ((poor, "poor"), (gone, "gone")):
            gateway.send(Hello(gateway_id))
            gateway.receive(Welcome)
        poor.send(*(Submit(make_request(digest, adapter=digest)) for digest in digests))
        asked = [poor.receive(NeedAdapter) for _ in digests]
        gone.close()
        poor.send(*(AdapterBytes(question.digest, None) for question in asked))
        ends: list[RequestEnd] = []
        while len(ends) < len(digests):
            ends += poor.receive(StepOutput).ends
        assert [end.failure.code for end in ends] == ["adapter_loading"] * 2
        poor.close()
    assert engine.exit_codes == [0]


def test_the_next_gateway_is_asked_at_once_where_one_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.engine.server.STATS_S", 60.0)
    with engine_thread(tmp_path) as engine:
        gone, there = RawGateway(engine.endpoint), RawGateway(engine.endpoint)
        for gateway, gateway_id in ((gone, "gone"), (there, "there")):
            gateway.send(Hello(gateway_id))
            gateway.receive(Welcome)
        gone.close()
        there.send(Submit(make_request("base", max_tokens=1)))
        while not there.receive(StepOutput).ends:
            pass
        there.send(Submit(make_request("a", adapter=DIGEST)))
        assert there.receive(NeedAdapter) == NeedAdapter(DIGEST)
        there.close()
    assert engine.exit_codes == [0]


def test_once_closed_no_adapter_is_waited_for(tmp_path: Path) -> None:
    fetch = AdapterFetch(ContentStore(tmp_path), lambda: None)
    fetch.close()
    with pytest.raises(AdapterLoading):
        fetch.fetch(DIGEST)
