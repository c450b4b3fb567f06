from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from loramux.kernels.select import select_ops

SELECT = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
sys.modules["{without}"] = None  # what an import finds where it is not built or installed
from loramux.kernels.select import select_ops
print(select_ops("{device}").name)
"""


def run(device: str, without: str) -> tuple[str, list[str]]:
    """What a process without this module prints and logs."""
    done = subprocess.run([sys.executable, "-c", SELECT.format(device=device, without=without)], capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.splitlines()


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="without a compiler nothing native is built")
def test_a_cpu_gets_the_native_operations() -> None:
    assert select_ops("cpu").name.startswith("cpu-")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton runs on Linux")
def test_a_gpu_gets_triton() -> None:
    assert run("cuda", without="loramux.kernels.cpu._native") == ("triton", [])


def test_without_the_extension_a_cpu_gets_the_reference_and_one_warning() -> None:
    name, lines = run("cpu", without="loramux.kernels.cpu._native")
    assert name == "reference"
    assert len(lines) == 1
    assert lines[0].startswith("WARNING loramux.kernels.select the native CPU kernels are not built")


def test_without_triton_a_gpu_gets_the_reference_and_one_warning() -> None:
    name, lines = run("cuda", without="triton")
    assert name == "reference"
    assert len(lines) == 1
    assert lines[0].startswith("WARNING loramux.kernels.select triton is missing")
