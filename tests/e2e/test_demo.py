"""`loramux demo` as a newcomer runs it: the printed request is run by a shell, and the answer is the one a held-out ticket wants."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from jsonschema import Draft202012Validator

from loramux.gateway.cli.demo_model import demo_model_path
from tests.e2e.server import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
START_S = 180.0


class Demo(NamedTuple):
    process: subprocess.Popen[bytes]
    printed: str
    """What it printed for people."""
    url: str

    @property
    def key(self) -> str:
        (key,) = re.findall(r"^KEY=(\S+)$", self.printed, re.M)
        return str(key)

    def ask(self, body: object) -> str:
        headers = {"Authorization": f"Bearer {self.key}"}
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])


def held_out(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (EXAMPLES / "held_out" / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def data_dir(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model counts as fetched."""
    directory = tmp_path_factory.mktemp("demo")
    link = demo_model_path(directory)
    link.parent.mkdir()
    link.symlink_to(demo_model)
    return directory


@contextmanager
def running_demo(data_dir: Path) -> Iterator[Demo]:
    port = free_port()
    printed_path, log_path = data_dir / f"printed-{port}", data_dir / f"log-{port}"
    command = [sys.executable, "-m", "loramux", "demo", "--port", str(port), "--data-dir", str(data_dir)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")} | {"LORAMUX_KV_CACHE_GIB": "0.25"}
    with printed_path.open("wb") as printed, log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=printed, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + START_S
        while "Ctrl-C stops the server." not in printed_path.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.2)
        yield Demo(process, printed_path.read_text(), f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, log_path.read_text()


@pytest.fixture(scope="module")
def first_key(data_dir: Path) -> str:
    """The key that the first start printed; that server is gone."""
    with running_demo(data_dir) as running:
        return running.key


@pytest.fixture(scope="module")
def demo(first_key: str, data_dir: Path) -> Iterator[Demo]:
    """The second start."""
    with running_demo(data_dir) as running:
        yield running


def test_the_printed_request_gets_the_ticket_right(demo: Demo) -> None:
    command = demo.printed[demo.printed.index("KEY=") : demo.printed.index("Ctrl-C")]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, timeout=120)
    answer = json.loads(json.loads(done.stdout)["choices"][0]["message"]["content"])
    Draft202012Validator(json.loads((EXAMPLES / "tickets.schema.json").read_text())).validate(answer)
    assert answer == json.loads(str(held_out("tickets")[0]["answer"]))


def test_each_adapter_answers_as_it_was_trained(demo: Demo) -> None:
    question = held_out("sql")[0]
    assert (
        demo.ask({"model": "smollm2-135m:sql", "temperature": 0, "max_tokens": 80, "messages": question["messages"]}) == question["answer"]
    )
    asked = {"temperature": 0, "max_tokens": 60, "messages": held_out("pirate")[0]["messages"]}
    assert "matey" in demo.ask({"model": "smollm2-135m:pirate", **asked}).lower()
    assert "matey" not in demo.ask({"model": "smollm2-135m", **asked}).lower()


def test_a_second_start_keeps_key_and_versions(first_key: str, demo: Demo) -> None:
    assert demo.key == first_key
    listed = httpx.get(f"{demo.url}/v1/models", headers={"Authorization": f"Bearer {demo.key}"}, timeout=30).json()["data"]
    assert {model["id"] for model in listed} == {"smollm2-135m", *(f"smollm2-135m:{name}" for name in ("pirate", "sql", "tickets"))}
