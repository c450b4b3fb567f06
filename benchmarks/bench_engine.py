"""What the engine itself costs, without HTTP.

    python benchmarks/bench_engine.py                     every part
    python benchmarks/bench_engine.py outside             some of them
    python benchmarks/bench_engine.py contexts --plot docs/contexts.svg

Each part prints one JSON line and appends it to benchmarks/results.jsonl. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from contexts import ContextSteps, context, read_gb_s
from contexts_plot import plot
from engine_outside import CASES, CONTEXT, OutsideSteps
from model_bytes import model_bytes
from results import record
from rounds import median_ms

from loramux.gateway.cli.demo_model import fetch_demo_model

CONTEXT_STREAMS = 8


def main() -> None:
    args = arguments()
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="bench-engine-") as directory:
            settings, figures = PARTS[part](args, Path(directory))
        record(f"engine-{part}", {"model": args.model.name, **settings}, figures, keep=not args.print_only)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", type=Path, help="a checkpoint's directory or GGUF file; the demo model if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="of each figure, taken in turn")
    parser.add_argument("--steps", type=int, default=40, help="decode steps of a round")
    parser.add_argument("--quantization", choices=["int8"], help="of `contexts`")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096], help="of `contexts`, in tokens")
    parser.add_argument("--plot", type=Path, help="where `contexts` writes a plot, as SVG")
    parser.add_argument("--print-only", action="store_true", help="keep nothing in results.jsonl")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"there is no part {min(unknown)}")
    args.parts = args.parts or list(PARTS)
    args.model = args.model or fetch_demo_model()
    return args


def outside(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Decode steps of 16 and 32 streams, less the forward pass: the least of the rounds' medians."""
    engine = OutsideSteps(args.model, directory, args.dtype)
    ms: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        for name, case in CASES.items():
            for num_streams in (16, 32):
                figure = median_ms(engine.seconds(case, num_streams, args.steps))
                best = ms.setdefault(name, {})
                best[str(num_streams)] = min(figure, best.get(str(num_streams), figure))
    engine.close()
    settings = {"dtype": args.dtype, "context": CONTEXT, "rounds": args.rounds, "steps": args.steps}
    return settings, {"outside_ms": ms}


def contexts(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Decode steps of 8 streams by the length of their contexts, beside the model of memory's bandwidth, which is measured too."""
    flags = ["--dtype", args.dtype, *(["--quantization", args.quantization] if args.quantization else [])]
    size, gb_s = model_bytes(args.model, directory, flags), read_gb_s()
    most = CONTEXT_STREAMS * (max(args.contexts) + 2 * args.steps)
    engine = ContextSteps(args.model, directory, args.dtype, args.quantization, most, size.kv_per_token)
    found = [
        context(tokens, engine.seconds(tokens, CONTEXT_STREAMS, args.steps), CONTEXT_STREAMS, size.read_per_step, size.kv_per_token, gb_s)
        for tokens in args.contexts
    ]
    engine.close()
    if args.plot:
        args.plot.write_text(plot(found, f"Decoding, {CONTEXT_STREAMS} streams, {args.model.name}, {args.quantization or args.dtype}"))
    settings = {"dtype": args.dtype, "quantization": args.quantization, "streams": CONTEXT_STREAMS, "steps": args.steps}
    rows = [{**each._asdict(), "of_model": round(each.tok_s / each.model_tok_s, 3)} for each in found]
    return settings, {"read_gb_s": round(gb_s, 1), **size._asdict(), "contexts": rows}


PARTS = {"outside": outside, "contexts": contexts}


if __name__ == "__main__":
    main()
