"""A checkpoint on disk: where its files are, what its digests are, which tokens end a sequence. Imports no torch.

A GGUF's configuration, tokenizer and chat template are converted once, in a child process, and cached by the file's digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loramux.errors import StartupFailed

_CONVERSION_VERSION = 2
"""Raised when `convert_gguf.py` writes something else, so that old conversions are not used."""

_CONVERSION_TIMEOUT_S = 600


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded. Filled by `open_checkpoint`."""

    name: str
    """The directory's or GGUF file's own name."""
    files_dir: Path
    """Holds config.json, tokenizer.json, and where there are such: generation_config.json, tokenizer_config.json,
    chat_template.jinja."""
    weights: tuple[Path, ...]
    """safetensors files, or one GGUF."""
    config: dict[str, Any]
    """config.json"""
    vocab_size: int
    """Rows of the embedding, padding included."""
    digest: str
    """`sha256:<hex>` over configuration and weights."""
    tokenizer_digest: str
    """`sha256:<hex>` of tokenizer.json."""
    eos_token_ids: tuple[int, ...]
    """From config, generation config and tokenizer together, in ascending order."""


def open_checkpoint(model: str, cache_dir: Path) -> Checkpoint:
    """Find a checkpoint's files and compute its digests. `model` is a directory, or a GGUF file, or a directory that holds one.

    Digests and conversions are kept in `cache_dir`, which is made. Raises `StartupFailed` naming the file that is missing or
    can't be read.
    """
    path = Path(model).expanduser().absolute()
    cache_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise StartupFailed(f"no model at {path}; give a checkpoint's directory or a GGUF file")
    gguf_file = _gguf_file(path)
    if gguf_file is None:
        return _open_directory(path, cache_dir)
    return _open_gguf(gguf_file, cache_dir)


def _gguf_file(path: Path) -> Path | None:
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() or not found:
        return None
    if len(found) > 1:
        raise StartupFailed(f"{path} holds {len(found)} GGUF files; give one of them, such as {found[0]}")
    return found[0]


def _open_gguf(path: Path, cache_dir: Path) -> Checkpoint:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise StartupFailed(f"{path} is not a GGUF file; give one, or a directory with config.json and safetensors")
    digest = _file_digest(path, cache_dir)
    files_dir = cache_dir / "gguf" / f"{digest}-{_CONVERSION_VERSION}"
    if not files_dir.is_dir():
        _convert(path, files_dir)
    return _described(path.stem, files_dir, (path,), _combined_digest([("weights", digest)]))


def _convert(path: Path, files_dir: Path) -> None:
    """Convert beside the final place and rename; whoever comes second finds it done."""
    files_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = files_dir.with_name(f".{files_dir.name}.{secrets.token_hex(4)}")
    try:
        _run_conversion(path, partial)
        partial.rename(files_dir)
    except OSError as error:
        if not files_dir.is_dir():
            raise StartupFailed(f"the conversion of {path} can't be kept in {files_dir.parent}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run_conversion(path: Path, partial: Path) -> None:
    command = [sys.executable, "-m", "loramux.engine.convert_gguf", str(path), str(partial)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_CONVERSION_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise StartupFailed(f"reading the tokenizer of {path} took over {_CONVERSION_TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise StartupFailed(f"{path} can't be used: {lines[-1]}")


def _open_directory(path: Path, cache_dir: Path) -> Checkpoint:
    weights = _safetensors(path)
    fields = [("config", hashlib.sha256(_read(path / "config.json")).hexdigest())]
    fields += [(file.name, _file_digest(file, cache_dir)) for file in weights]
    return _described(path.name, path, weights, _combined_digest(fields))


def _safetensors(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    whole = path / "model.safetensors"
    if index.exists():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        files = tuple(path / name for name in names if Path(name).name == name)
    elif whole.exists() or not any(path.glob("pytorch_model*.bin")):
        files = (whole,)
    else:
        raise StartupFailed(f"{path} has its weights only as pickle (pytorch_model.bin), which is never read; convert them to safetensors")
    for file in files:
        if not file.is_file():
            raise StartupFailed(f"{file} is missing; download the checkpoint again")
    if not files:
        raise StartupFailed(f"{index} names no files; download the checkpoint again")
    return files


def _described(name: str, files_dir: Path, weights: tuple[Path, ...], digest: str) -> Checkpoint:
    config = _read_json(files_dir / "config.json")
    tokenizer_file = files_dir / "tokenizer.json"
    if not tokenizer_file.exists():
        raise StartupFailed(
            f"{files_dir} has no tokenizer.json; make one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise StartupFailed(f"{files_dir / 'config.json'} has no vocab_size; only text models of the Llama family are supported")
    return Checkpoint(
        name=name,
        files_dir=files_dir,
        weights=weights,
        config=config,
        vocab_size=vocab_size,
        digest=digest,
        tokenizer_digest=f"sha256:{hashlib.sha256(_read(tokenizer_file)).hexdigest()}",
        eos_token_ids=_eos_token_ids(files_dir, config, vocab_size),
    )


def _eos_token_ids(files_dir: Path, config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (config, _read_json_if_there(files_dir / "generation_config.json")):
        given = source.get("eos_token_id")
        found.update(given if isinstance(given, list) else [] if given is None else [given])
    tokenizer = _load_tokenizer(files_dir / "tokenizer.json")
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_json_if_there(files_dir / file).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
        found.update([] if token_id is None else [token_id])
    return tuple(sorted(token_id for token_id in found if 0 <= token_id < vocab_size))


def _load_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise StartupFailed(f"{file} can't be read as a tokenizer ({error})") from error


def _file_digest(path: Path, cache_dir: Path) -> str:
    """SHA-256 in hex, remembered under the file's path, size and time of change."""
    status = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()
    remembered = cache_dir / "digests" / key
    if remembered.exists():
        return remembered.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    remembered.parent.mkdir(exist_ok=True)
    partial = remembered.with_name(f".{key}.{secrets.token_hex(4)}")
    partial.write_text(digest)
    partial.replace(remembered)
    return digest


def _combined_digest(fields: Iterable[tuple[str, str]]) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(list(fields)).encode()).hexdigest()}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupFailed(f"{path} can't be read: {error.strerror}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise StartupFailed(f"{path} is not JSON ({error}); download the checkpoint again") from error
    if not isinstance(value, dict):
        raise StartupFailed(f"{path} is not a JSON object; download the checkpoint again")
    return value


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}
