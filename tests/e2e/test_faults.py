"""What breaks while it runs: the engine process, and the server itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import ADMIN_KEY, Server, assert_idle, engine_pid, running_server
from tests.lora.random_adapters import write_random_adapter

FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.05")


def test_a_killed_engine_ends_streams_with_an_error_event_and_comes_back(tiny_llama: Path, tmp_path: Path) -> None:
    with running_server(tiny_llama, tmp_path / "data", *FLAGS) as server:
        headers = {"Authorization": f"Bearer {server.new_tenant('acme')}"}
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        whole: list[httpx.Response] = []
        waiter = threading.Thread(
            target=lambda: whole.append(httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60))
        )
        events: list[str] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, headers=headers, timeout=60) as response:
            assert response.status_code == 200
            waiter.start()
            for line in response.iter_lines():
                if not line:
                    continue
                events.append(line)
                if len(events) == 5:
                    os.kill(engine_pid(server), signal.SIGKILL)
        waiter.join()
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["code"] == "no_engine"
        assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "no_engine"
        assert "retry-after" in whole[0].headers
        server.wait_ready()
        assert httpx.post(f"{server.url}/v1/completions", json={**body, "max_tokens": 2}, headers=headers, timeout=60).status_code == 200
        assert_idle(server)


def test_what_is_registered_survives_a_restart(tiny_llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    filed = write_random_adapter(root / "filed", tiny_llama, rank=4, modules=("q_proj",), seed=1)
    uploaded = write_random_adapter(tmp_path / "uploaded", tiny_llama, rank=4, modules=("q_proj", "down_proj"), seed=2)
    flags = (*FLAGS, "--adapter-root", str(root))
    question = {"prompt": "The keeper", "max_tokens": 16, "temperature": 0, "ignore_eos": True}

    def ask(server: Server, key: str) -> dict[str, str]:
        answers = {}
        for model in ("tiny", "tiny:filed", "tiny:uploaded"):
            response = httpx.post(
                f"{server.url}/v1/completions", json={**question, "model": model}, headers={"Authorization": f"Bearer {key}"}, timeout=60
            )
            assert response.status_code == 200, response.text
            answers[model] = response.json()["choices"][0]["text"]
        return answers

    with running_server(tiny_llama, tmp_path / "data", *flags) as server:
        key = server.new_tenant("acme")
        server.register("filed", filed, "tiny", ["acme"])
        files = {name: (uploaded / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
        report = server.must("POST", "/adapters/uploaded/versions", data={"base": "tiny", "tenants": '["acme"]'}, files=files)
        assert report["version"] == 1 and report["state"] == "ready"
        before = ask(server, key)
        assert len(set(before.values())) == 3, "the adapters change nothing"
        assert server.stop() == 0
    (filed / "adapter_model.safetensors").unlink()
    with running_server(tiny_llama, tmp_path / "data", *flags) as server:
        assert ask(server, key) == before


def test_sigterm_finishes_what_is_in_flight(tiny_llama: Path, tmp_path: Path) -> None:
    with running_server(tiny_llama, tmp_path / "data", *FLAGS) as server:
        headers = {"Authorization": f"Bearer {server.new_tenant('acme')}"}
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        lines: list[str] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 3:
                    server.process.send_signal(signal.SIGTERM)
        finish = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines if line.startswith("data: {")]
        assert finish[-1] == "length"
        assert server.process.wait(timeout=30) == 0


def test_a_second_signal_ends_what_is_in_flight(tiny_llama: Path, tmp_path: Path) -> None:
    with running_server(tiny_llama, tmp_path / "data", *FLAGS) as server:
        headers = {"Authorization": f"Bearer {server.new_tenant('acme')}"}
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "n": 8, "ignore_eos": True}
        whole: list[httpx.Response] = []
        waiter = threading.Thread(
            target=lambda: whole.append(httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60))
        )
        waiter.start()
        while not server.engine()["stats"]["num_running"]:
            time.sleep(0.02)
        lines: list[str] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, headers=headers, timeout=60) as response:
            for line in filter(None, response.iter_lines()):
                lines.append(line)
                if len(lines) in (50, 100):
                    assert server.process.poll() is None
                    server.process.send_signal(signal.SIGTERM if len(lines) == 50 else signal.SIGINT)
        started = time.monotonic()
        waiter.join()
        assert lines[-1] == "data: [DONE]" and lines[-3] == "event: error"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "no_engine"
        assert whole[0].status_code == 503
        assert server.process.wait(timeout=30) == 0 and time.monotonic() - started < 5


def test_a_data_directory_serves_one_server(tiny_llama: Path, tmp_path: Path) -> None:
    with running_server(tiny_llama, tmp_path / "data", *FLAGS):
        second = _serve("--model", str(tiny_llama), "--data-dir", str(tmp_path / "data"), "--port", "0")
    assert second.returncode == 1
    assert len(second.stderr.strip().splitlines()) == 1 and "Traceback" not in second.stderr


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--model", "nowhere"), 1),
        (("--model", "{model}", "--max-model-len", "100000"), 1),
        (("--model", "{model}", "--max-modle-len", "100"), 2),
        (("--model", "{model}", "--no-auth", "--host", "0.0.0.0"), 1),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(tiny_llama: Path, tmp_path: Path, flags: tuple[str, ...], code: int) -> None:
    filled = [flag.format(model=tiny_llama) for flag in flags]
    result = _serve(*filled, "--data-dir", str(tmp_path / "data"), "--port", "0")
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.strip()
    if code == 1:
        assert len([line for line in result.stderr.strip().splitlines() if not line.startswith("{")]) == 1


def _serve(*flags: str) -> subprocess.CompletedProcess[str]:
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "loramux", "serve", *flags],
        env={**os.environ, "LORAMUX_ADMIN_KEY": ADMIN_KEY},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert time.monotonic() - started < 100
    return result
