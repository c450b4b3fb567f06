"""What requests meet in a server: a cached prefix, a schema, a start, a busy neighbour, long prompts of others; and its memory.

    python benchmarks/bench_service.py                       every part, on `loramux serve` with the demo model
    python benchmarks/bench_service.py prefix start          some of them
    python benchmarks/bench_service.py schema -- --quantization int8        flags for `loramux serve`

Each part prints one JSON line and appends it to benchmarks/results.jsonl; its ratios are of figures taken in that run. Measure on an
idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import arrivals as prompt_arrivals
from bench_serve import split_flags
from closed_loop import Load, completion, words
from memory import COMPILE_WORKER, resident_by_process
from model_bytes import model_bytes
from results import record
from rounds import in_turn
from schemas import response_formats
from server import Server, admin_client, new_tenant, send, send_load, serving

from loramux.gateway.cli.demo_model import fetch_demo_model

NUM_STREAMS = 16
PREFIX_TOKENS, TAIL_TOKENS = 1000, 16
SAMPLE_S = 0.5
GIB = 2**30
KV_GIB = 0.25
"""For `memory`: so little that a load writes all of it."""


def main() -> None:
    args = arguments()
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="bench-service-") as directory:
            settings, figures = PARTS[part](args, Path(directory))
        settings = {"model": args.model.name, "flags": args.flags, "label": args.label, **settings}
        record(f"service-{part}", settings, figures, keep=not args.print_only)


def arguments() -> argparse.Namespace:
    given, flags = split_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", type=Path, help="a checkpoint's directory or GGUF file; the demo model if not given")
    parser.add_argument("--rounds", type=int, default=3, help="of each figure, those to be compared taken in turn")
    parser.add_argument("--requests-per-stream", type=int, default=10)
    parser.add_argument("--label", default="", help="kept in the settings of the result")
    parser.add_argument("--print-only", action="store_true", help="keep nothing in results.jsonl")
    args = parser.parse_args(given, argparse.Namespace(flags=flags))
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"there is no part {min(unknown)}")
    args.parts = args.parts or list(PARTS)
    args.model = args.model or fetch_demo_model()
    return args


@contextmanager
def tenant_of(args: argparse.Namespace, directory: Path, flags: Sequence[str] = ()) -> Iterator[tuple[Server, str]]:
    """A server and a key for it, once it has answered a request."""
    with serving(args.model, directory, [*args.flags, *flags]) as server:
        with admin_client(server) as admin:
            key = new_tenant(admin, "bench")
        send_load(server, key, Load([server.base], NUM_STREAMS, NUM_STREAMS, 8, 4, "warm"))
        yield server, key


def prefix(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time to first token of prompts that share 1,000 tokens with none before, and of others that share them with one."""
    rng = random.Random(0)
    first_ms: dict[str, list[float]] = {"not_cached": [], "cached": []}
    num_cached = 0
    with tenant_of(args, directory) as (server, key):
        for _ in range(3 * args.rounds):
            shared = words(rng, PREFIX_TOKENS)
            for name in first_ms:
                figures = send(server, key, [completion(server.base, shared + words(rng, TAIL_TOKENS), 1)], 1)
                first_ms[name].append(figures["ttft_ms_p50"])
            num_cached += figures["cached_tokens"]
    ms = {name: statistics.median(each) for name, each in first_ms.items()}
    settings = {"prefix_tokens": PREFIX_TOKENS, "tail_tokens": TAIL_TOKENS, "prompts": 3 * args.rounds}
    figures = {"ttft_ms": ms, "cached_of_not": round(ms["cached"] / ms["not_cached"], 3), "cached_tokens": num_cached / (3 * args.rounds)}
    return settings, figures


def schema(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Throughput of 16 streams whose every request has a JSON schema, and of free text; the schemas have been compiled before."""
    formats = response_formats()
    kinds: dict[str, Sequence[dict[str, Any]]] = {"free": [{}], "schema": formats}
    num_requests, seeds = NUM_STREAMS * args.requests_per_stream, iter(range(1000))
    with tenant_of(args, directory) as (server, key):
        send_load(server, key, Load([server.base], 1, len(formats), 8, 4, "compile", formats))

        def out_tok_s(fields: Sequence[dict[str, Any]]) -> list[float]:
            figures = send_load(server, key, Load([server.base], NUM_STREAMS, num_requests, 16, 128, str(next(seeds)), fields))
            if figures["completion_tokens"] != 128 * num_requests:
                sys.exit(f"answers have {figures['completion_tokens'] / num_requests} tokens, not 128")
            return [figures["out_tok_s"]]

        figures = in_turn({name: lambda fields=fields: out_tok_s(fields) for name, fields in kinds.items()}, args.rounds)
    free, constrained = (statistics.median(figures[name]) for name in kinds)
    settings = {"streams": NUM_STREAMS, "tokens_in": 16, "tokens_out": 128, "schemas": len(formats), "requests": num_requests}
    return settings, {"out_tok_s": figures, "schema_of_free": round(constrained / free, 3)}


def start(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """From starting the process to its first token, after one start from the same directory."""
    starts = []
    with tenant_of(args, directory) as (_, key):
        pass
    for turn in range(args.rounds):
        with serving(args.model, directory, args.flags) as server:
            ready_s = time.time() - server.started_at
            send(server, key, [completion(server.base, f" start {turn}", 1)], 1)
            first_token_s = time.time() - server.started_at
            parts = {message: at - server.started_at for message, at in logged(server.log) if message in START_MESSAGES}
        parts |= {"ready": ready_s, "first token": first_token_s}
        starts.append({name: round(seconds, 2) for name, seconds in parts.items()})
    return {"rounds": args.rounds}, {"starts_s": starts, "first_token_s": statistics.median(each["first token"] for each in starts)}


START_MESSAGES = {"the engine is ready", "serving"}


def logged(log: Path) -> Iterator[tuple[str, float]]:
    """(message, seconds since 1970) of each line of a server's log that is one."""
    for line in log.read_text().splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            yield entry["message"], datetime.fromisoformat(entry["time"]).timestamp()


def memory(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all processes but compile workers hold beyond weights and KV while 16 streams run, once the KV cache has been written."""
    size, kv_bytes = model_bytes(args.model, directory, args.flags), int(KV_GIB * GIB)
    with tenant_of(args, directory / "server", ["--kv-cache-gib", str(KV_GIB)]) as (server, key), ThreadPoolExecutor(1) as thread:
        num_to_fill = NUM_STREAMS + int(1.2 * kv_bytes / size.kv_per_token / (128 + 64))
        send_load(server, key, Load([server.base], NUM_STREAMS, num_to_fill, 128, 64, "fill"))
        load = Load([server.base], NUM_STREAMS, NUM_STREAMS * args.requests_per_stream, 128, 64, "load")
        sent = thread.submit(send_load, server, key, load)
        held = [resident_by_process(server.pid)]
        while not sent.done():
            time.sleep(SAMPLE_S)
            held.append(resident_by_process(server.pid))
        sent.result()
    totals = [sum(num for name, num in each.items() if name != COMPILE_WORKER) for each in held]
    most = max(totals)
    parts = {"all": most, "weights": size.weights, "kv": kv_bytes, "beyond": most - size.weights - kv_bytes}
    settings = {"streams": NUM_STREAMS, "kv_cache_gib": KV_GIB, "samples": len(held)}
    return settings, {"mib": mib(parts), "mib_by_process": mib(held[totals.index(most)])}


def mib(sizes: Mapping[str, int]) -> dict[str, float]:
    return {name: round(num_bytes / 2**20, 1) for name, num_bytes in sizes.items()}


def neighbour(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Throughput of 16 streams, 128 tokens in and 64 out, on a machine by themselves and beside a process that never waits."""
    seeds = iter(range(1000))
    with tenant_of(args, directory) as (server, key):

        def out_tok_s(*beside: AbstractContextManager[None]) -> list[float]:
            load = Load([server.base], NUM_STREAMS, NUM_STREAMS * args.requests_per_stream, 128, 64, str(next(seeds)))
            with ExitStack() as stack:
                for each in beside:
                    stack.enter_context(each)
                return [send_load(server, key, load)["out_tok_s"]]

        figures = in_turn({"alone": out_tok_s, "busy": lambda: out_tok_s(busy_process())}, args.rounds)
    alone, busy = (statistics.median(each) for each in figures.values())
    settings = {"streams": NUM_STREAMS, "tokens_in": 128, "tokens_out": 64, "busy_processes": 1}
    return settings, {"out_tok_s": figures, "busy_of_alone": round(busy / alone, 3)}


@contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def arrivals(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time per output token of 8 streams, by themselves and while prompts of 2,000 tokens arrive one after another."""
    load = {"num_streams": 8, "num_prompts": 3 * args.rounds, "prompt_tokens": 2000, "alone_s": 10.0, "max_tokens": 6000}
    with tenant_of(args, directory, ["--kv-cache-gib", "2"]) as (server, key):
        figures = prompt_arrivals.measure(server, key, **load, seed="arrivals")
    beside, alone = figures["beside"], figures["alone"]
    ratios = {"p99_of_p50": beside["ms_p99"] / beside["ms_p50"], "p99_of_p50_alone": beside["ms_p99"] / alone["ms_p50"]}
    return load, {**figures, **{name: round(ratio, 2) for name, ratio in ratios.items()}}


PARTS = {"prefix": prefix, "schema": schema, "start": start, "memory": memory, "neighbour": neighbour, "arrivals": arrivals}


if __name__ == "__main__":
    main()
