"""`loramux adapters inspect`: the registration report of a PEFT directory, without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from loramux.adapters.contents import AdapterFiles
from loramux.adapters.inspection import Inspection, inspect
from loramux.adapters.peft_format import validate
from loramux.adapters.source import LocalSource
from loramux.adapters.types import BaseDescription, RegistrationReport
from loramux.errors import AdapterInvalid, InvalidRequest, StartupFailed
from loramux.gateway.settings import default_data_dir


def run_inspect(directory: Path, model: str | None, dtype: str, max_lora_rank: int) -> int:
    """Print what `model` would make of the adapter, or what is known without one; 0 if it is valid, else 1."""
    try:
        files = LocalSource([directory]).read(str(directory.resolve()))
        report = _report(files, None if model is None else _describe(model, dtype, max_lora_rank))
    except (AdapterInvalid, InvalidRequest, StartupFailed) as error:
        print(f"loramux: {error.message}", file=sys.stderr)
        return 1
    print(json.dumps(msgspec.to_builtins(report), indent=2, ensure_ascii=False))
    return 1 if report.errors else 0


def _report(files: AdapterFiles, base: BaseDescription | None) -> RegistrationReport | Inspection:
    config, tensors = files.contents
    return inspect(config, tensors) if base is None else validate(config, tensors, base, added_tokens=files.added_tokens)


def _describe(model: str, dtype: str, max_lora_rank: int) -> BaseDescription:
    from loramux.engine.describe import describe_checkpoint  # it loads torch, which no other command of the gateway needs

    return describe_checkpoint(model, default_data_dir() / "checkpoints", dtype=dtype, max_lora_rank=max_lora_rank)
