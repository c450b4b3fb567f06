"""Throughput and latency over HTTP: the base model and eight mixed rank-16 adapters, each with 1 and 16 streams.

    python benchmarks/bench_serve.py                                  starts `loramux serve` with the demo model in a temporary directory
    python benchmarks/bench_serve.py --model DIR_OR_GGUF              the same with another model
    python benchmarks/bench_serve.py --url URL --key KEY --models base,base:one,base:two      loads a server that is running

Prints one JSON line per run and appends it to benchmarks/results.jsonl. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import closed_loop
import httpx
import random_adapters
from results import record

from loramux.engine.checkpoint import open_checkpoint
from loramux.gateway.cli.demo_model import fetch_demo_model

NUM_ADAPTERS = 8
RANK = 16
START_TIMEOUT_S = 300


def main() -> None:
    args = arguments()
    if args.url:
        sys.exit(asyncio.run(measure(args, args.url, args.key, {"given": args.models.split(",")}, {"url": args.url})))
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as directory, serving(args, Path(directory)) as (url, admin_key):
        adapters = write_adapters(args.model, Path(directory))
        key = admit(url, admin_key, args.name, adapters)
        workloads = {"base": [args.name], "mixed": [f"{args.name}:{path.name}" for path in adapters]}
        exit_code = asyncio.run(measure(args, url, key, workloads, {"model": args.model.name, "flags": args.flags}))
    sys.exit(exit_code)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server, instead of starting one")
    parser.add_argument("--key", default="", help="with --url: a key with scope `infer`")
    parser.add_argument("--models", help="with --url: model names, taken in turn")
    parser.add_argument("--model", type=Path, help="a checkpoint's directory or GGUF file; the demo model if not given")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests-per-stream", type=int, help="8 with one stream, 4 with more, if not given")
    parser.add_argument("--words-in", type=int, default=128)
    parser.add_argument("--tokens-out", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="", help="kept in the settings of the result")
    parser.add_argument("--print-only", action="store_true", help="keep nothing in results.jsonl")
    parser.add_argument("flags", nargs="*", help="after `--`: more flags for `loramux serve`")
    args = parser.parse_args()
    if args.url and not args.models:
        parser.error("--url needs --models")
    args.name = "base"
    if not args.url and args.model is None:
        args.model, args.name = fetch_demo_model(), "smollm2-135m"
    return args


async def measure(args: argparse.Namespace, url: str, key: str, workloads: dict[str, list[str]], settings: dict[str, Any]) -> int:
    """Run and record every workload with every number of streams, after one short request to each model. 1 if any request failed."""
    num_errors = 0
    limits, headers = httpx.Limits(max_connections=None), {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers, limits=limits) as client:
        for workload, models in workloads.items():
            await closed_loop.run(client, closed_loop.Load(models, 1, len(models), 8, 4, f"{args.seed}-warm-{workload}"))
            for num_streams in args.streams:
                per_stream = args.requests_per_stream or (8 if num_streams == 1 else 4)
                seed = f"{args.seed}-{workload}-{num_streams}"
                load = closed_loop.Load(models, num_streams, num_streams * per_stream, args.words_in, args.tokens_out, seed)
                figures = await closed_loop.run(client, load)
                run = {"workload": workload, "label": args.label, **load._asdict(), "models": len(models)}
                record("serve", settings | run, figures, keep=not args.print_only)
                num_errors += figures["errors"]
    return int(num_errors > 0)


@contextmanager
def serving(args: argparse.Namespace, directory: Path) -> Iterator[tuple[str, str]]:
    """`loramux serve` on a free port; its address and admin key, once it is ready. Its log is shown if it fails to start."""
    port, admin_key, log_path = free_port(), secrets.token_hex(32), directory / "serve.log"
    (directory / "adapters").mkdir()
    command = [sys.executable, "-m", "loramux", "serve", "--model", str(args.model), "--served-model-name", args.name]
    command += ["--port", str(port), "--data-dir", str(directory / "data"), "--adapter-root", str(directory / "adapters"), *args.flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "LORAMUX_ADMIN_KEY": admin_key})
    try:
        url = f"http://127.0.0.1:{port}"
        if not ready(process, url):
            sys.exit(f"the server did not start:\n{log_path.read_text()}")
        yield url, admin_key
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def ready(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    return False


def write_adapters(model: Path, directory: Path) -> list[Path]:
    config = open_checkpoint(str(model), directory / "checkpoints").config
    paths = [directory / "adapters" / f"random-{i}" for i in range(NUM_ADAPTERS)]
    for seed, path in enumerate(paths):
        random_adapters.write_random_adapter(path, config, RANK, seed)
    return paths


def admit(url: str, admin_key: str, base: str, adapters: Sequence[Path]) -> str:
    """Make a tenant that may use every adapter, and return its key."""
    with httpx.Client(base_url=f"{url}/admin/v1", headers={"Authorization": f"Bearer {admin_key}"}, timeout=120) as admin:
        post(admin, "/tenants", {"id": "bench"})
        for path in adapters:
            source = {"uri": f"file:{path}"}
            post(admin, f"/adapters/{path.name}/versions", {"base": base, "source": source, "tenants": ["bench"]})
        key: str = post(admin, "/tenants/bench/keys", {"scopes": ["infer"]})["key"]
        return key


def post(admin: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = admin.post(path, json=body)
    if not response.is_success:
        sys.exit(f"{path}: {response.status_code} {response.text}")
    return response.json()


if __name__ == "__main__":
    main()
