from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from loramux.kernels.reference.ops import ReferenceOps
from loramux.kernels.select import select_ops

WITHOUT_NATIVE = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
sys.modules["loramux.kernels.cpu._native"] = None  # what an import finds where the extension was not built
from loramux.kernels.select import select_ops
print(select_ops("{device}").name)
"""


def run(device: str) -> tuple[str, list[str]]:
    """What a process without the extension prints and logs."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_NATIVE.format(device=device)], capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.splitlines()


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="without a compiler nothing native is built")
def test_a_cpu_gets_the_native_operations() -> None:
    assert select_ops("cpu").name.startswith("cpu-")


def test_another_device_gets_the_reference() -> None:
    assert type(select_ops("cuda")) is ReferenceOps


def test_without_the_extension_a_cpu_gets_the_reference_and_one_warning() -> None:
    name, lines = run("cpu")
    assert name == "reference"
    assert len(lines) == 1
    assert lines[0].startswith("WARNING loramux.kernels.select the native CPU kernels are not built")


def test_without_the_extension_another_device_is_silent() -> None:
    assert run("cuda") == ("reference", [])
