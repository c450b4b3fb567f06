"""Throughput and latency over HTTP: decoding at 1, 16 and 32 streams, prompts and answers, eight mixed rank-16 adapters, prefill.

    python benchmarks/bench_serve.py                            every workload, on `loramux serve` with the demo model
    python benchmarks/bench_serve.py 16x128/64 16x128/64+lora   some: STREAMSxTOKENS_IN/TOKENS_OUT, `+lora` for the adapters
    python benchmarks/bench_serve.py 1x16/128 -- --quantization int8                       flags for `loramux serve`
    python benchmarks/bench_serve.py --url URL --key KEY --models base,base:one            loads a server that is running

Prints one JSON line per workload and appends it to benchmarks/results.jsonl. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import closed_loop
import httpx
from results import record
from server import Server, admin_client, new_tenant, register, serving, write_adapters
from workloads import SUITE, Workload, parse_workload

from loramux.gateway.cli.demo_model import fetch_demo_model

NUM_ADAPTERS = 8
RANK = 16


def main() -> None:
    args = arguments()
    if args.url:
        models = args.models.split(",")
        sys.exit(asyncio.run(measure(args, args.url, args.key, models, models, {"url": args.url})))
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as directory, serving(args.model, Path(directory), args.flags) as server:
        key, mixed = prepared(server, args)
        settings = {"model": args.model.name, "flags": args.flags}
        exit_code = asyncio.run(measure(args, server.url, key, [server.base], mixed, settings))
    sys.exit(exit_code)


def arguments() -> argparse.Namespace:
    given, flags = split_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", type=parse_workload, help=f"{' '.join(map(str, SUITE))} if none is given")
    parser.add_argument("--url", help="a running server, instead of starting one")
    parser.add_argument("--key", default="", help="with --url: a key with scope `infer`")
    parser.add_argument("--models", help="with --url: model names, taken in turn")
    parser.add_argument("--model", type=Path, help="a checkpoint's directory or GGUF file; the demo model if not given")
    parser.add_argument("--requests-per-stream", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="", help="kept in the settings of the result")
    parser.add_argument("--print-only", action="store_true", help="keep nothing in results.jsonl")
    args = parser.parse_args(given, argparse.Namespace(flags=flags))
    if args.url and not args.models:
        parser.error("--url needs --models")
    if not args.url and args.model is None:
        args.model = fetch_demo_model()
    args.workloads = args.workloads or SUITE
    return args


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those before `--`, and those after it, which are the server's."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def prepared(server: Server, args: argparse.Namespace) -> tuple[str, list[str]]:
    """A tenant's key, and the models of mixed workloads, where there are any."""
    with admin_client(server) as admin:
        key = new_tenant(admin, "bench")
        if not any(workload.mixed for workload in args.workloads):
            return key, []
        return key, [register(admin, path, "bench") for path in write_adapters(args.model, server.adapter_root, NUM_ADAPTERS, RANK)]


async def measure(args: argparse.Namespace, url: str, key: str, base: Sequence[str], mixed: Sequence[str], settings: dict[str, Any]) -> int:
    """Run and record every workload, after one short request to each of its models. 1 if any request failed."""
    num_errors = 0
    limits, headers = httpx.Limits(max_connections=None), {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers, limits=limits) as client:
        for workload in args.workloads:
            models = mixed if workload.mixed else base
            await closed_loop.run(client, closed_loop.Load(models, 1, len(models), 8, 4, f"{args.seed}-warm-{workload}"))
            figures = await closed_loop.run(client, load_of(workload, models, args))
            run = {"workload": str(workload), "label": args.label, "models": len(models), **workload._asdict(), "seed": args.seed}
            record("serve", settings | run, figures, keep=not args.print_only)
            warn_of_other_tokens(workload, figures)
            num_errors += figures["errors"]
    return int(num_errors > 0)


def load_of(workload: Workload, models: Sequence[str], args: argparse.Namespace) -> closed_loop.Load:
    streams, num_requests = workload.num_streams, workload.num_streams * args.requests_per_stream
    return closed_loop.Load(models, streams, num_requests, workload.num_tokens_in, workload.num_tokens_out, f"{args.seed}-{workload}")


def warn_of_other_tokens(workload: Workload, figures: dict[str, Any]) -> None:
    """A prompt is made of words, which a tokenizer may split, or put a token before."""
    each = figures["prompt_tokens"] / max(1, figures["requests"])
    if figures["requests"] and each != workload.num_tokens_in:
        print(f"{workload}: prompts had {each:.1f} tokens, not {workload.num_tokens_in}", file=sys.stderr)


if __name__ == "__main__":
    main()
