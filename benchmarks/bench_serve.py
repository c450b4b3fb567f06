"""Throughput and latency over HTTP: the base model and eight mixed rank-16 adapters, each with 1 and 16 streams.

    python benchmarks/bench_serve.py                                  starts `loramux serve` with the demo model in a temporary directory
    python benchmarks/bench_serve.py --model DIR_OR_GGUF              the same with another model
    python benchmarks/bench_serve.py --url URL --key KEY --models base,base:one,base:two      loads a server that is running

Prints one JSON line per run and appends it to benchmarks/results.jsonl. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import closed_loop
import httpx
from results import record
from server import admin_client, new_tenant, register, serving, write_adapters

from loramux.gateway.cli.demo_model import fetch_demo_model

NUM_ADAPTERS = 8
RANK = 16


def main() -> None:
    args = arguments()
    if args.url:
        sys.exit(asyncio.run(measure(args, args.url, args.key, {"given": args.models.split(",")}, {"url": args.url})))
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as directory, serving(args.model, Path(directory), args.flags) as server:
        adapters = write_adapters(args.model, server.adapter_root, NUM_ADAPTERS, RANK)
        with admin_client(server) as admin:
            key = new_tenant(admin, "bench")
            models = [register(admin, path, "bench") for path in adapters]
        workloads = {"base": [server.base], "mixed": models}
        exit_code = asyncio.run(measure(args, server.url, key, workloads, {"model": args.model.name, "flags": args.flags}))
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
    if not args.url and args.model is None:
        args.model = fetch_demo_model()
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


if __name__ == "__main__":
    main()
