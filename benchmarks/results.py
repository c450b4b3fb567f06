"""One JSON line per benchmark run, for people and for the committed results file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.jsonl")


def record(benchmark: str, settings: dict[str, Any], figures: dict[str, Any], *, device: str = "cpu", keep: bool = True) -> None:
    """Print the run's line, and append it unless told not to `keep` it."""
    line = json.dumps(
        {
            "benchmark": benchmark,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"device": device, "cpu": cpu_model(), "cores": os.cpu_count(), "memory_gib": memory_gib()},
            "versions": versions(),
            "settings": settings,
            **figures,
        }
    )
    print(line, flush=True)
    if keep:
        with RESULTS.open("a") as file:
            file.write(line + "\n")


def versions() -> dict[str, str]:
    names = ("loramux", "torch", "transformers", "xgrammar")
    return {"commit": commit(), "python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def commit() -> str:
    """Of the working tree, marked `-dirty` where tracked files differ from it; empty outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False).stdout.strip()


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
