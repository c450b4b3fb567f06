"""The client against the real loop over a real socket, and against an engine that misbehaves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from loramux.engine.client import EngineClient
from loramux.engine.interface import Engine, Generation
from loramux.engine.protocol import Hello, PlaceAdapter, Placed, StepOutput, Submit, Welcome, decode_to_engine, encode
from loramux.engine.types import AdapterResidency, EngineStats, RequestEnd, TokenDelta
from loramux.errors import AdapterLoading, InvalidRequest, NoEngine
from tests.engine.engine_process import collect, connected, engine_thread, has_nothing, until
from tests.engine.fake_core import REFUSED, make_request
from tests.fakes import base_description, engine_info


async def test_a_request_from_submission_to_its_record(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint) as client:
            as_engine: Engine = client
            assert as_engine.info == engine.core.info
            generation = client.submit(make_request("a", max_tokens=4))
            as_generation: Generation = generation
            await as_generation.admitted()
            deltas = await collect(generation)
            assert [token for delta in deltas for token in delta.token_ids] == [0, 1, 2, 3]
            assert await generation.ended() == RequestEnd("a", "finished", 2, 0, 4)
            assert client.num_in_flight == 0
            generation.abort()


async def test_many_at_once_from_two_gateways(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint) as one, connected(engine.endpoint) as two:
            clients = [one, two] * 20
            generations = [client.submit(make_request(f"r{index}", max_tokens=1 + index)) for index, client in enumerate(clients)]
            for index, deltas in enumerate(await asyncio.gather(*map(collect, generations))):
                assert [token for delta in deltas for token in delta.token_ids] == list(range(1 + index))


async def test_a_refusal_is_raised_by_admitted(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint) as client:
            generation = client.submit(make_request("a", prompt=(REFUSED,)))
            with pytest.raises(InvalidRequest, match="no such prompt"):
                await generation.admitted()
            with pytest.raises(InvalidRequest):
                await collect(generation)
            assert (await generation.ended()).end == "failed"


async def test_abort_ends_a_request(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint) as client:
            generation = client.submit(make_request("a", max_tokens=10**9))
            await generation.admitted()
            seen = [delta async for delta in _until_aborted(generation.deltas(), generation.abort)]
            end = await generation.ended()
            assert end.end == "aborted"
            assert end.num_completion_tokens == sum(len(delta.token_ids) for delta in seen)


async def _until_aborted(deltas, abort):
    async for delta in deltas:
        abort()
        yield delta


async def test_statistics_arrive_while_idle(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint) as client:
            await collect(client.submit(make_request("a", max_tokens=7)))
            await until(lambda: client.stats == EngineStats(num_steps=7), timeout_s=5)


async def test_placing_dropping_and_what_every_gateway_hears_of_it(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint) as one, connected(engine.endpoint) as two:
            await one.place("sha256:a", "device", pinned=True)
            there = AdapterResidency("sha256:a", "device", pinned=True, num_bytes=7, rank=8)
            await until(lambda: one.residency == two.residency == {"sha256:a": there}, timeout_s=5)
            async with connected(engine.endpoint) as late:
                assert late.residency == {"sha256:a": there}
            with pytest.raises(AdapterLoading, match="no gateway has it"):
                await two.place("missing", "host")
            two.drop("sha256:a")
            await until(lambda: one.residency == two.residency == {}, timeout_s=5)


async def test_without_an_engine_nothing_is_accepted(tmp_path: Path) -> None:
    client = EngineClient(f"ipc://{tmp_path}/nobody", has_nothing)
    await client.start()
    with pytest.raises(NoEngine):
        client.submit(make_request("a"))
    with pytest.raises(NoEngine):
        await client.place("sha256:a", "host")
    client.drop("sha256:a")
    assert client.residency == {}
    await client.close()


async def test_a_request_that_can_not_be_sent_leaves_nothing(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint) as client:
            with pytest.raises(OverflowError):
                client.submit(make_request("a", prompt=(1 << 70,)))
            assert client.num_in_flight == 0
            assert len(await collect(client.submit(make_request("a")))) == 5


async def test_close_ends_what_is_in_flight(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        async with connected(engine.endpoint) as client:
            generation = client.submit(make_request("a", max_tokens=10**9))
            await generation.admitted()
        with pytest.raises(NoEngine):
            await collect(generation)
        await until(lambda: not engine.core.has_work(), timeout_s=5)


class ScriptedEngine:
    """The engine's end of the socket, worked by hand."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        self._gateway = b""

    async def receive(self, kind: type) -> object:
        """The next message of that kind; others are skipped."""
        async with asyncio.timeout(10):
            while True:
                self._gateway, payload = await self._socket.recv_multipart()
                message = decode_to_engine(payload)
                if isinstance(message, kind):
                    return message

    async def send(self, message: object) -> None:
        await self._socket.send_multipart([self._gateway, message if isinstance(message, bytes) else encode(message)])

    async def welcome(self) -> None:
        await self.receive(Hello)
        await self.send(Welcome(engine_info(base_description(100, (0,)))))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
async def scripted(tmp_path: Path):
    engine = ScriptedEngine(f"ipc://{tmp_path}/engine")
    yield engine
    engine.close()


async def test_a_lost_engine_ends_everything_with_the_counts_last_seen(scripted: ScriptedEngine) -> None:
    welcome = asyncio.create_task(scripted.welcome())
    async with connected(scripted.endpoint) as client:
        await welcome
        running, waiting = client.submit(make_request("running", prompt=(1, 2, 3))), client.submit(make_request("waiting"))
        for _ in range(2):
            await scripted.receive(Submit)
        await scripted.send(StepOutput(("running",), (TokenDelta("running", 0, (5, 6), "x"),), (), EngineStats(num_running=1)))
        await running.admitted()
        client.lost("the engine process died")
        assert client.info is None
        assert client.stats == EngineStats()
        assert client.num_in_flight == 0
        with pytest.raises(NoEngine, match="died"):
            await waiting.admitted()
        deltas = []
        with pytest.raises(NoEngine, match="died"):
            async for delta in running.deltas():
                deltas.append(delta)
        assert [delta.token_ids for delta in deltas] == [(5, 6)]
        end = await running.ended()
        assert (end.end, end.num_prompt_tokens, end.num_completion_tokens) == ("failed", 3, 2)
        with pytest.raises(NoEngine):
            client.submit(make_request("later"))
        await scripted.welcome()
        await until(lambda: client.info is not None)


async def test_a_lost_engine_fails_placements_and_has_no_adapters(scripted: ScriptedEngine) -> None:
    welcome = asyncio.create_task(scripted.welcome())
    async with connected(scripted.endpoint) as client:
        await welcome
        placing = asyncio.create_task(client.place("sha256:a", "device"))
        operation = await scripted.receive(PlaceAdapter)
        assert isinstance(operation, PlaceAdapter) and (operation.digest, operation.tier, operation.pinned) == ("sha256:a", "device", None)
        loading, there = AdapterResidency("sha256:a", "none", "loading"), AdapterResidency("sha256:b", "host")
        await scripted.send(StepOutput(residency=(loading, there)))
        await until(lambda: client.residency == {"sha256:a": loading, "sha256:b": there}, timeout_s=5)
        await scripted.send(Placed("another operation"))
        client.lost("the engine process died")
        assert client.residency == {}
        with pytest.raises(NoEngine, match="died"):
            await placing


async def test_a_placement_given_up_leaves_nothing(scripted: ScriptedEngine) -> None:
    welcome = asyncio.create_task(scripted.welcome())
    async with connected(scripted.endpoint) as client:
        await welcome
        placing = asyncio.create_task(client.place("sha256:a", "host"))
        operation = await scripted.receive(PlaceAdapter)
        assert isinstance(operation, PlaceAdapter)
        placing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await placing
        await scripted.send(Placed(operation.operation_id))
        await scripted.send(StepOutput(residency=(AdapterResidency("sha256:a", "host"),)))
        await until(lambda: "sha256:a" in client.residency, timeout_s=5)


async def test_a_second_welcome_means_that_the_engine_forgot_us(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.engine.client.HEARTBEAT_S", 0.05)
    welcome = asyncio.create_task(scripted.welcome())
    async with connected(scripted.endpoint) as client:
        await welcome
        generation = client.submit(make_request("a"))
        await scripted.welcome()
        with pytest.raises(NoEngine):
            await generation.admitted()
        assert client.info is not None
        again = client.submit(make_request("b"))
        await scripted.send(StepOutput(("b",), (), (RequestEnd("b", "finished", 2, 0, 0),)))
        await again.admitted()
        assert await collect(again) == []


async def test_an_engine_that_falls_silent_is_lost(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.engine.client.HEARTBEAT_S", 0.05)
    welcome = asyncio.create_task(scripted.welcome())
    async with connected(scripted.endpoint, engine_timeout_s=0.5) as client:
        await welcome
        generation = client.submit(make_request("a"))
        with pytest.raises(NoEngine, match="does not answer"):
            await generation.admitted()
        async with asyncio.timeout(10):
            while client.info is None:
                await scripted.welcome()  # the first hellos are still those of the connection given up


async def test_nonsense_from_the_engine_is_dropped(scripted: ScriptedEngine) -> None:
    welcome = asyncio.create_task(scripted.welcome())
    async with connected(scripted.endpoint) as client:
        await welcome
        generation = client.submit(make_request("a"))
        await scripted.receive(Submit)
        for nonsense in (b"", b"\xc1", encode({"type": "Welcome"}), b"\x91" * 10_000):
            await scripted.send(nonsense)
        unknown = (TokenDelta("nobody", 0, (1,)),)
        await scripted.send(
            StepOutput(("a", "nobody"), unknown, (RequestEnd("nobody", "finished", 1, 0, 1), RequestEnd("a", "finished", 2, 0, 0)))
        )
        await generation.admitted()
        assert await collect(generation) == []


def test_a_client_imports_no_torch() -> None:
    code = "import sys, loramux.engine.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
