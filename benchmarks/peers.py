"""Other engines on this machine: the model in the form that each wants, and each started or run on a workload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from server import BASE, START_TIMEOUT_S, answers, free_port
from transformers import AutoModelForCausalLM
from workloads import Workload

from loramux.engine.checkpoint import open_checkpoint


def bfloat16_gguf(quantize: Path, model: Path, directory: Path) -> Path:
    """By llama.cpp's `llama-quantize`. Raises SystemExit with its words if it fails."""
    path = directory / "bfloat16.gguf"
    done = subprocess.run([quantize, "--allow-requantize", model, path, "BF16"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{quantize} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return path


def batched_bench(binary: Path, model: Path, workload: Workload) -> dict[str, Any]:
    """A workload in llama.cpp's own loop: all prompts, then all answers, without a server. Raises SystemExit if it fails."""
    streams, tokens_in, tokens_out, _ = workload
    command = [str(binary), "-m", str(model), "-c", str(streams * (tokens_in + tokens_out) + 64), "-b", "2048", "-ub", "512"]
    command += [
        "-npp",
        str(tokens_in),
        "-ntg",
        str(tokens_out),
        "-npl",
        str(streams),
        "-t",
        str(os.cpu_count()),
        "--output-format",
        "jsonl",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{binary} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    found = json.loads(lines[-1])
    return {
        "out_tok_s": round(streams * tokens_out / found["t"], 1),
        "decode_tok_s": round(found["speed_tg"], 1),
        "in_tok_s": round(found["speed_pp"], 1),
        "wall_s": round(found["t"], 2),
    }


def bfloat16_directory(model: Path, directory: Path) -> Path:
    """The demo model, or any other GGUF, as a directory that transformers and vLLM read; another model's directory as it is."""
    if model.is_dir():
        return model
    loaded = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.bfloat16)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": [type(loaded).__name__], "dtype": "bfloat16"}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, default=str))
    tied = {"lm_head.weight"} if loaded.config.tie_word_embeddings else set()
    tensors = {name: tensor.contiguous() for name, tensor in loaded.state_dict().items() if name not in tied}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    files = open_checkpoint(str(model), directory / "tokenizer").files_dir
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((files / name).read_bytes())
    return directory


@contextmanager
def vllm_serving(python: Path, model: Path, directory: Path, adapters: Sequence[Path]) -> Iterator[str | None]:
    """The address of vLLM's server, with the adapters under their directories' names; None, with its log shown, if it does not start."""
    port, log_path = free_port(), directory / "vllm.log"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", BASE]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    if adapters:
        command += ["--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", "16"]
        command += ["--lora-modules", *(f"{path.name}={path}" for path in adapters)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            if answers(process, client, "/health", START_TIMEOUT_S):
                yield f"http://127.0.0.1:{port}"
                return
        print(f"vLLM did not start:\n{log_path.read_text()[-3000:]}", file=sys.stderr)
        yield None
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
