"""Every kernel compiles to machine code, by the compiler and assembler that come with triton; what it computes there needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAX_SHARED_BYTES = 99 * 1024
"""What a block may have on the smallest of the GPUs (8.6, 8.9)."""

KERNELS = {
    "_shrink",
    "_expand",
    "_embed",
    "_add_rms_norm",
    "_silu_mul",
    "_rope_cache",
    "_paged_attention",
    "_combine",
    "_apply_bitmask",
    "_draw",
    "_int8_matmul",
}


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [
        ("bf16", 90),
        *(
            pytest.param(dtype, capability, marks=pytest.mark.slow)
            for dtype in ("bf16", "fp16", "fp32")
            for capability in (80, 89, 90, 100, 120)
            if (dtype, capability) != ("bf16", 90)
        ),
    ],
)
def test_kernels_compile(dtype: str, capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), dtype, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, _ in lines} == KERNELS
    assert all(int(shared) <= MAX_SHARED_BYTES and int(code) > 0 for _, shared, code in lines), done.stdout
