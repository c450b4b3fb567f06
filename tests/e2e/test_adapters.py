"""The life of an adapter in a running server: registered, loaded, pinned, drained, replaced, deleted."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, assert_idle, engine_pid, running_server
from tests.lora.random_adapters import write_random_adapter

MAX_LORAS = 3
ADAPTER_BYTES = 10240
HOST_ADAPTERS = 6
"""How many host memory holds."""
QUESTION = {"prompt": "The keeper of the lighthouse", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
NUM_STREAMED_TOKENS = 2500
"""Enough that a stream outlasts what is done meanwhile."""


class Host:
    """A server whose adapters come and go. Those of different seeds answer differently; a name means its last version."""

    def __init__(self, server: Server, model: Path, root: Path) -> None:
        self.server, self.model, self.root = server, model, root
        self.headers = {"Authorization": f"Bearer {server.new_tenant('acme')}"}
        self.numbers: dict[str, int] = {}
        """Of the last version, by name: a number is never given out again."""

    def register(self, name: str, seed: int, **fields: Any) -> Any:
        directory = self.root / str(seed)
        write_random_adapter(directory, self.model, rank=4, modules=("q_proj", "down_proj"), seed=seed)
        body = {"base": "tiny", "source": {"uri": f"file:{directory}"}, "tenants": ["acme"], **fields}
        version = self.server.must("POST", f"/adapters/{name}/versions", json=body)
        self.numbers[name] = version["version"]
        return version

    def version(self, name: str) -> Any:
        return self.server.must("GET", f"/adapters/{name}/versions/{self.numbers[name]}")

    def try_to(self, action: str, name: str, **body: Any) -> httpx.Response:
        return self.server.admin("POST", f"/adapters/{name}/versions/{self.numbers[name]}/{action}", json=body)

    def act(self, action: str, name: str, **body: Any) -> Any:
        response = self.try_to(action, name, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def ask(self, model: str, **changes: Any) -> httpx.Response:
        return httpx.post(
            f"{self.server.url}/v1/completions", json={**QUESTION, **changes, "model": model}, headers=self.headers, timeout=60
        )

    def text(self, model: str) -> str:
        """As far as it is sure to begin a longer answer too: without the half character that it may end in."""
        response = self.ask(model)
        assert response.status_code == 200, response.text
        return _text(response).rstrip("\ufffd")

    @contextmanager
    def streaming(self, model: str, n: int = 1) -> Iterator[Callable[[], str]]:
        """A stream that has begun; what is yielded reads the rest, and returns the whole text once it has ended properly."""
        body = {**QUESTION, "model": model, "stream": True, "max_tokens": NUM_STREAMED_TOKENS, "n": n}
        with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, headers=self.headers, timeout=60) as response:
            assert response.status_code == 200
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            seen = [next(lines), next(lines)]

            def finish() -> str:
                seen.extend(lines)
                assert seen[-1] == "[DONE]"
                choices = [json.loads(line)["choices"][0] for line in seen[:-1]]
                assert choices[-1]["finish_reason"] == "length"
                return "".join(choice["text"] for choice in choices)

            yield finish

    def resident(self) -> set[str]:
        """Digests of the adapters that the engine has."""
        return {each["digest"] for each in self.server.engine()["adapters"]}

    def stored(self) -> set[str]:
        """Digests of the adapters on disk."""
        return {f"sha256:{each.name}" for each in (self.server.log_path.parent / "data" / "adapters" / "sha256").iterdir()}

    def metric(self, line: str) -> float:
        found = re.search(rf"^{re.escape(line)} (\S+)$", httpx.get(f"{self.server.url}/metrics").text, re.MULTILINE)
        assert found, line
        return float(found[1])


@pytest.fixture(scope="module")
def running(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    directory = tmp_path_factory.mktemp("adapters-life")
    memory = ("--kv-cache-gib", "0.05", "--lora-host-gib", f"{(HOST_ADAPTERS + 0.5) * ADAPTER_BYTES / (1 << 30):.9f}")
    flags = ("--dtype", "float32", "--max-loras", str(MAX_LORAS), "--num-threads", "1", "--adapter-root", str(directory), *memory)
    with running_server(tiny_llama, directory / "data", *flags) as server:
        yield Host(server, tiny_llama, directory)


@pytest.fixture
def host(running: Host) -> Iterator[Host]:
    """Afterwards every adapter is deleted, and none is left anywhere."""
    yield running
    for record in running.server.must("GET", "/adapters")["data"]:
        running.server.must("DELETE", f"/adapters/{record['name']}")
    assert_idle(running.server)
    until(lambda: not running.resident() and not running.stored())
    until(lambda: running.server.engine()["stats"]["host_adapter_bytes"] == 0)


def _text(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["text"]
    return text


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def placements(host: Host, name: str) -> list[tuple[str, str, bool]]:
    return [(each["tier"], each["state"], each["pinned"]) for each in host.version(name)["placements"]]


def test_a_preloaded_adapter_is_where_it_was_asked_for(host: Host) -> None:
    assert host.register("plain", 1)["placements"] == []
    host.register("warm", 2, preload={"tier": "host"})
    host.register("hot", 3, preload={"tier": "device", "min_engines": 1})
    assert placements(host, "warm") == [("host", "ready", False)] and placements(host, "hot") == [("device", "ready", False)]
    assert host.resident() == {host.version(name)["digest"] for name in ("warm", "hot")}
    assert host.metric('loramux_engine_adapters{state="ready",tier="host"}') == 1
    assert host.metric('loramux_engine_adapters{state="ready",tier="device"}') == 1
    host.act("preload", "plain")
    assert placements(host, "plain") == [("device", "ready", False)]
    (adapter,) = [each for each in host.server.engine()["adapters"] if each["digest"] == host.version("plain")["digest"]]
    assert adapter["rank"] == 4 and adapter["num_bytes"] == ADAPTER_BYTES


def test_a_pin_survives_the_engine(host: Host) -> None:
    host.register("pinned", 1)
    host.register("loaded", 2, preload={"tier": "host"})
    host.act("pin", "pinned")
    assert placements(host, "pinned") == [("device", "ready", True)]
    os.kill(engine_pid(host.server), signal.SIGKILL)
    until(lambda: not host.server.must("GET", "/engines")["data"])
    host.server.wait_ready()
    until(lambda: placements(host, "pinned") == [("device", "ready", True)] and placements(host, "loaded") == [("host", "ready", False)])
    host.act("pin", "pinned", pinned=False)
    assert [pinned for _, _, pinned in placements(host, "pinned")] == [False]


def test_pins_leave_a_slot_and_everyone_else_is_served_through_it(host: Host) -> None:
    for seed in range(MAX_LORAS + 1):
        host.register(f"a{seed}", seed)
    for seed in range(MAX_LORAS - 1):
        host.act("pin", f"a{seed}")
    refused = host.try_to("pin", f"a{MAX_LORAS - 1}")
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "conflict"
    models = ["tiny", *(f"tiny:a{seed}" for seed in range(MAX_LORAS + 1))]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda number: host.ask(models[number % len(models)], max_tokens=8), range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert [placements(host, f"a{seed}") for seed in range(MAX_LORAS - 1)] == [[("device", "ready", True)]] * (MAX_LORAS - 1)


def test_draining_refuses_new_requests_and_lets_streams_finish(host: Host) -> None:
    host.register("tickets", 1)
    expected = host.text("tiny:tickets")
    with host.streaming("tiny:tickets") as finish:
        drained = host.act("drain", "tickets")
        assert (drained["state"], drained["in_flight"]) == ("draining", 1)
        refused = host.ask("tiny:tickets")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining" and int(refused.headers["retry-after"]) > 0
        assert host.try_to("pin", "tickets").status_code == 409
        assert finish().startswith(expected)
    until(lambda: not host.resident())
    assert host.stored() == {drained["digest"]}
    assert host.register("tickets", 1)["state"] == "ready"
    assert host.text("tiny:tickets") == expected


def test_a_version_is_ready_again_while_it_still_drains(host: Host) -> None:
    digest = host.register("tickets", 1)["digest"]
    expected = host.text("tiny:tickets")
    with host.streaming("tiny:tickets") as finish:
        assert placements(host, "tickets") == [("device", "ready", False)]
        host.act("drain", "tickets")
        host.register("tickets", 1, preload={"tier": "device"})
        host.act("pin", "tickets")
        assert host.text("tiny:tickets") == expected
        assert finish().startswith(expected)
    assert host.resident() == {digest} and placements(host, "tickets") == [("device", "ready", True)]
    assert host.text("tiny:tickets") == expected


def test_a_stream_finishes_on_the_version_that_is_deleted_meanwhile(host: Host) -> None:
    digest = host.register("tickets", 1)["digest"]
    expected = host.text("tiny:tickets")
    with host.streaming("tiny:tickets") as finish:
        host.server.must("DELETE", "/adapters/tickets")
        gone = host.ask("tiny:tickets")
        assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
        assert digest in host.resident(), "the stream was over before the deletion"
        assert finish().startswith(expected)
    until(lambda: not host.resident() and not host.stored())


def test_changed_weights_under_an_old_name_change_later_requests_only(host: Host) -> None:
    old = host.register("tickets", 1)
    before = host.text("tiny:tickets")
    with host.streaming("tiny:tickets") as finish:
        new = host.register("tickets", 2)
        assert new["version"] == old["version"] + 1 and new["digest"] != old["digest"]
        host.server.must("PUT", "/adapters/tickets/aliases/prod", json={"version": new["version"]})
        host.server.must("DELETE", f"/adapters/tickets/versions/{old['version']}")
        after = host.ask("tiny:tickets")
        assert after.headers["x-loramux-model"] == f"tiny:{new['id']}; digest={new['digest']}"
        assert finish().startswith(before)
    assert _text(after).startswith(host.text("tiny:tickets")) and host.text("tiny:tickets") != before
    until(lambda: host.resident() == {new["digest"]} == host.stored())


def test_first_uses_at_a_time_load_an_adapter_once(host: Host) -> None:
    host.register("tickets", 1)
    loads = "loramux_engine_adapter_loads_total"
    before = host.metric(loads)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: host.text("tiny:tickets"), range(8)))
    assert len(set(texts)) == 1
    until(lambda: host.metric(loads) == before + 1)


def test_a_client_that_leaves_in_the_middle_holds_nothing(host: Host) -> None:
    host.register("tickets", 1)
    with host.streaming("tiny:tickets", n=3):
        host.server.must("DELETE", "/adapters/tickets")
    until(lambda: not host.resident() and not host.stored())


def test_whoever_asks_while_versions_come_and_go_gets_the_one_that_the_header_names(host: Host) -> None:
    """No request fails: the version that it was resolved to stays for as long as it takes."""
    texts, stop = {host.register("tickets", 0)["digest"]: host.text("tiny:tickets")}, threading.Event()
    answers: list[httpx.Response] = []

    def ask_on() -> None:
        while not stop.is_set():
            answers.append(host.ask("tiny:tickets"))

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on) for _ in range(4)]
        try:
            for seed in range(1, 8):
                old = host.numbers["tickets"]
                new = host.register("tickets", seed)
                host.server.must("PUT", "/adapters/tickets/aliases/prod", json={"version": new["version"]})
                host.server.must("DELETE", f"/adapters/tickets/versions/{old}")
                texts[new["digest"]] = host.text(f"tiny:tickets@{new['version']}")
        finally:
            stop.set()
        for each in asking:
            each.result()
    assert {answer.status_code for answer in answers} == {200}
    wrong = [answer for answer in answers if not _text(answer).startswith(texts[answer.headers["x-loramux-model"].partition("digest=")[2]])]
    assert not wrong and len(set(texts.values())) == 8


def test_many_may_be_registered_whatever_the_slots_and_the_memory(host: Host) -> None:
    digests = {host.register(f"a{seed}", seed)["digest"] for seed in range(4 * MAX_LORAS)}
    assert len(digests) == 4 * MAX_LORAS
    before = host.metric("loramux_engine_adapter_evictions_total")
    answers = {_text(host.ask(f"tiny:a{seed}", max_tokens=8)) for seed in range(4 * MAX_LORAS)}
    assert len(answers) > 2 * MAX_LORAS, "adapters answer alike"
    until(lambda: host.metric("loramux_engine_adapter_evictions_total") >= before + 4 * MAX_LORAS - HOST_ADAPTERS)
    assert len(host.resident()) <= HOST_ADAPTERS
