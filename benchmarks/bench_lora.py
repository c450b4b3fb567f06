"""What many adapters cost: in a step, in registered numbers, in turns over few slots, in time to a first token, in memory.

    python benchmarks/bench_lora.py                       every part
    python benchmarks/bench_lora.py steps turns           some of them

Each part prints one JSON line and appends it to benchmarks/results.jsonl; its ratios are of figures taken in that run. Measure on an
idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import closed_loop
import httpx
from lora_steps import EngineSteps, LoraPart, read_adapter
from memory import resident_bytes
from results import record
from rounds import in_turn, median_ms
from server import Server, admin_client, call, new_tenant, register, send_load, serving, write_adapters

from loramux.gateway.cli.demo_model import fetch_demo_model

RANK = 16
NUM_STREAMS = 16
PREFILL_TOKENS = 512
SMALL = ("self_attn.q_proj", "self_attn.v_proj")


def main() -> None:
    args = arguments()
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="bench-lora-") as directory:
            settings, figures = PARTS[part](args, Path(directory))
        record(f"lora-{part}", {"model": args.model.name, **settings}, figures, keep=not args.print_only)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", type=Path, help="a checkpoint's directory or GGUF file; the demo model if not given")
    parser.add_argument("--dtype", help="bfloat16 for `steps`, and what the server chooses for the others, if not given")
    parser.add_argument("--rounds", type=int, default=5, help="of each figure of `steps` and `registered`, taken in turn")
    parser.add_argument("--steps", type=int, default=12, help="decode steps of a round")
    parser.add_argument("--num-registered", type=int, default=1000)
    parser.add_argument("--print-only", action="store_true", help="keep nothing in results.jsonl")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"there is no part {min(unknown)}")
    args.parts = args.parts or list(PARTS)
    args.model = args.model or fetch_demo_model()
    return args


def steps(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Decode steps of 16 streams and a prefill of 512 tokens, beside those of an engine that never saw an adapter."""
    adapters = [read_adapter(path) for path in write_adapters(args.model, directory / "adapters", 8, RANK)]
    dtype = args.dtype or "bfloat16"
    digests = [adapter.digest for adapter in adapters]
    plain = EngineSteps(args.model, directory / "plain", dtype, [])
    full = EngineSteps(args.model, directory / "full", dtype, adapters)
    cases: dict[str, Callable[[], list[float]]] = {
        "base": lambda: plain.decode_s([None] * NUM_STREAMS, args.steps),
        "none_active": lambda: full.decode_s([None] * NUM_STREAMS, args.steps),
        "one": lambda: full.decode_s(digests[:1] * NUM_STREAMS, args.steps),
        "eight": lambda: full.decode_s(digests * (NUM_STREAMS // 8), args.steps),
        "prefill_base": lambda: [plain.prefill_s(None, PREFILL_TOKENS)],
        "prefill_one": lambda: [full.prefill_s(digests[0], PREFILL_TOKENS)],
    }
    ms = {name: median_ms(seconds) for name, seconds in in_turn(cases, args.rounds).items()}
    plain.close()
    full.close()
    part = LoraPart(args.model, directory / "checkpoints", dtype, adapters)
    parts = {f"lora_{num}": lambda num=num: part.seconds(NUM_STREAMS, num, args.steps) for num in (1, 8)}
    ms |= {name: median_ms(seconds) for name, seconds in in_turn(parts, args.rounds).items()}
    ratios = {name: round(ms["base"] / ms[name], 3) for name in ("none_active", "one", "eight")}
    ratios["prefill_one"] = round(ms["prefill_base"] / ms["prefill_one"], 3)
    settings = {"dtype": dtype, "rank": RANK, "streams": NUM_STREAMS, "prefill_tokens": PREFILL_TOKENS, "adapter_bytes": part.adapter_bytes}
    return settings, {"ms": ms, "of_base": ratios, "lora_1_gb_s": gb_s(part.adapter_bytes, ms["lora_1"])}


def dtype_flags(args: argparse.Namespace) -> list[str]:
    return ["--dtype", args.dtype] if args.dtype else []


def gb_s(num_bytes: int, ms: float) -> float:
    return round(num_bytes / ms / 1e6, 2)


def registered(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Throughput over eight adapters of a server that has eight registered, and of one that has a thousand, in turn."""
    with ExitStack() as stack:
        servers = {
            num: stack.enter_context(serving(args.model, directory / str(num), dtype_flags(args))) for num in (8, args.num_registered)
        }
        keys, register_s = {}, {}
        for num, server in servers.items():
            with admin_client(server) as admin:
                keys[num] = new_tenant(admin, "bench")
                active = write_adapters(args.model, server.adapter_root, 8, RANK)
                paths = [*active, *write_adapters(args.model, server.adapter_root, num - 8, 4, modules=SMALL)]
                start = time.perf_counter()
                models = [register(admin, path, "bench") for path in paths][:8]
                register_s[num] = round(time.perf_counter() - start, 1)
            load(server, keys[num], models, 16, 16, "warm")
        cases = {
            str(num): lambda server=server, key=keys[num]: [load(server, key, models, 32, 64, str(time.time()))["out_tok_s"]]
            for num, server in servers.items()
        }
        out_tok_s = in_turn(cases, args.rounds)
    few, many = (statistics.median(figures) for figures in out_tok_s.values())
    settings = {"dtype": args.dtype or "auto", "active": 8, "streams": NUM_STREAMS, "rounds": args.rounds}
    return settings, {"out_tok_s": out_tok_s, "of_few": round(many / few, 3), "register_s": register_s}


def turns(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sixteen adapters in turn, 16 streams, 128 tokens in and 64 out, over 16 slots and over 8."""
    figures = {}
    for num_slots in (16, 8):
        flags = [*dtype_flags(args), "--max-loras", str(num_slots)]
        with serving(args.model, directory / str(num_slots), flags) as server, admin_client(server) as admin:
            key = new_tenant(admin, "bench")
            models = [register(admin, path, "bench") for path in write_adapters(args.model, server.adapter_root, 16, RANK)]
            load(server, key, models, 16, 4, "warm")
            figures[str(num_slots)] = load(server, key, models, 64, 64, "turns")
    ratio = figures["8"]["ttft_ms_p50"] / figures["16"]["ttft_ms_p50"]
    return {"dtype": args.dtype or "auto", "adapters": 16, "streams": NUM_STREAMS}, {"slots": figures, "ttft_ratio": round(ratio, 2)}


def first_token(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """From the start of registering a 5 MB adapter to its first token, on an idle server."""
    seconds = []
    with serving(args.model, directory, dtype_flags(args)) as server, admin_client(server) as admin:
        key = new_tenant(admin, "bench")
        paths = write_adapters(args.model, server.adapter_root, 6, 8)
        for path in paths:
            start = time.perf_counter()
            model = register(admin, path, "bench")
            load(server, key, [model], 1, 1, path.name, num_streams=1, num_words=8)
            seconds.append(time.perf_counter() - start)
        num_bytes = (paths[0] / "adapter_model.safetensors").stat().st_size
    return {"dtype": args.dtype or "auto", "bytes": num_bytes}, {
        "seconds": [round(each, 3) for each in seconds],
        "p50_s": round(statistics.median(seconds), 3),
    }


def memory(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Resident memory of gateway, engine and store before adapters are registered, used and deleted, and after."""
    batch = 50
    with serving(args.model, directory, dtype_flags(args)) as server, admin_client(server) as admin:
        key = new_tenant(admin, "bench")
        paths = write_adapters(args.model, server.adapter_root, args.num_registered, 4, modules=SMALL)
        live(server, admin, key, paths[:batch])
        before = resident_bytes(server.pid)
        peak = before
        for start in range(0, len(paths), batch):
            peak = max(peak, live(server, admin, key, paths[start : start + batch]))
        after = settled_bytes(server.pid)
    mib = {name: round(value / 2**20, 1) for name, value in (("before", before), ("peak", peak), ("after", after))}
    return {"dtype": args.dtype or "auto", "adapters": args.num_registered}, {"mib": mib, "of_before": round(after / before, 3)}


def live(server: Server, admin: httpx.Client, key: str, paths: Sequence[Path]) -> int:
    """Register, use and delete adapters. -> bytes resident while all are there"""
    models = [register(admin, path, "bench") for path in paths]
    load(server, key, models, len(models), 1, paths[0].name, num_words=4)
    resident = resident_bytes(server.pid)
    for path in paths:
        call(admin, "DELETE", f"/adapters/{path.name}")
    return resident


def settled_bytes(pid: int) -> int:
    """The least within a few seconds: deletions are finished after they are answered."""
    return min((time.sleep(0.5), resident_bytes(pid))[1] for _ in range(10))


def load(
    server: Server,
    key: str,
    models: Sequence[str],
    num_requests: int,
    num_tokens_out: int,
    seed: str,
    *,
    num_streams: int = NUM_STREAMS,
    num_words: int = 128,
) -> dict[str, Any]:
    """Raises SystemExit if a request fails."""
    return send_load(server, key, closed_loop.Load(models, num_streams, num_requests, num_words, num_tokens_out, seed))


PARTS = {"steps": steps, "registered": registered, "turns": turns, "first-token": first_token, "memory": memory}


if __name__ == "__main__":
    main()
