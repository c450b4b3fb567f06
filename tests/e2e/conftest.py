from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.server import Server, assert_idle, running_server
from tests.lora.random_adapters import write_random_adapter

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class World:
    """A server over the tiny checkpoint, with two tenants and three adapters; `acme` may use all, `globex` only the first."""

    server: Server
    model: Path
    adapters: dict[str, Path]
    acme_key: str
    globex_key: str


@pytest.fixture(scope="session")
def world(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("adapters")
    adapters = {
        "alpha": write_random_adapter(root / "alpha", tiny_llama, rank=8, modules=("q_proj", "v_proj"), seed=1),
        "beta": write_random_adapter(root / "beta", tiny_llama, rank=16, modules=ALL_LINEAR, rslora=True, seed=2),
        "gamma": write_random_adapter(root / "gamma", tiny_llama, rank=4, modules=("o_proj", "down_proj"), layers=(1,), seed=3),
    }
    data_dir = tmp_path_factory.mktemp("world") / "data"
    flags = ("--dtype", "float32", "--kv-cache-gib", "0.05", "--max-num-seqs", "16", "--adapter-root", str(root))
    with running_server(tiny_llama, data_dir, *flags) as server:
        acme_key, globex_key = server.new_tenant("acme"), server.new_tenant("globex")
        for name, directory in adapters.items():
            server.register(name, directory, "tiny", ["acme", "globex"] if name == "alpha" else ["acme"])
        yield World(server, tiny_llama, adapters, acme_key, globex_key)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "world" in request.fixturenames:
        assert_idle(request.getfixturevalue("world").server)
