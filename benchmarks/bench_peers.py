"""The workloads of bench_serve.py on other engines that are installed, each in an environment of its own; what is absent is skipped.

    python benchmarks/bench_peers.py --llama-batched-bench PATH     of llama.cpp, with llama-quantize beside it
    python benchmarks/bench_peers.py --vllm PYTHON                  an environment's python that has vLLM for CPUs
    python benchmarks/bench_peers.py --llama-batched-bench PATH --vllm PYTHON 16x128/64 16x128/64+lora

llama.cpp is measured in its own loop, without a server; vLLM over HTTP, as ours is. Prints one JSON line per engine and workload and
appends it to benchmarks/results.jsonl. Measure on an idle machine, right before or after ours.
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
from bench_serve import NUM_ADAPTERS, RANK, load_of
from peers import batched_bench, bfloat16_directory, bfloat16_gguf, vllm_serving
from results import record
from server import BASE, write_adapters
from workloads import SUITE, Workload, parse_workload

from loramux.gateway.cli.demo_model import fetch_demo_model


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as directory:
        for peer in (llama_cpp, vllm):
            peer(args, Path(directory))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", type=parse_workload, help=f"{' '.join(map(str, SUITE))} if none is given")
    parser.add_argument("--llama-batched-bench", type=Path)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--model", type=Path, help="a GGUF file, or for vLLM alone a directory; the demo model if not given")
    parser.add_argument("--requests-per-stream", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-only", action="store_true", help="keep nothing in results.jsonl")
    args = parser.parse_args()
    args.workloads = args.workloads or SUITE
    args.model = args.model or fetch_demo_model()
    return args


def llama_cpp(args: argparse.Namespace, directory: Path) -> None:
    binary = args.llama_batched_bench
    if not is_there("llama.cpp", binary):
        return
    model = bfloat16_gguf(binary.with_name("llama-quantize"), args.model, directory)
    for workload in args.workloads:
        if workload.mixed:
            print(f"{workload}: skipped, llama.cpp can't mix adapters in a batch", file=sys.stderr)
            continue
        keep(args, "llama.cpp", workload, batched_bench(binary, model, workload))


def vllm(args: argparse.Namespace, directory: Path) -> None:
    """One server for the base's workloads, and one with adapters for those that mix them."""
    if not is_there("vLLM", args.vllm):
        return
    model = bfloat16_directory(args.model, directory / "model")
    for mixed in (False, True):
        workloads = [workload for workload in args.workloads if workload.mixed == mixed]
        if not workloads:
            continue
        adapters = write_adapters(args.model, directory / "adapters", NUM_ADAPTERS, RANK) if mixed else []
        with vllm_serving(args.vllm, model, directory, adapters) as url:
            if url is not None:
                asyncio.run(load_vllm(args, url, [path.name for path in adapters] or [BASE], workloads))


async def load_vllm(args: argparse.Namespace, url: str, models: Sequence[str], workloads: Sequence[Workload]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        for workload in workloads:
            await closed_loop.run(client, closed_loop.Load(models, 1, len(models), 8, 4, f"warm-{workload}"))
            keep(args, "vllm", workload, await closed_loop.run(client, load_of(workload, models, args)))


def is_there(peer: str, path: Path | None) -> bool:
    if path is not None and path.exists():
        return True
    print(f"{peer}: skipped, {'its path is not given' if path is None else f'there is no {path}'}", file=sys.stderr)
    return False


def keep(args: argparse.Namespace, peer: str, workload: Workload, figures: dict[str, Any]) -> None:
    settings = {"peer": peer, "model": args.model.name, "dtype": "bfloat16", "workload": str(workload), **workload._asdict()}
    record("peers", settings, figures, keep=not args.print_only)


if __name__ == "__main__":
    main()
