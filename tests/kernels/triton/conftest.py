"""The kernels under Triton's interpreter, on a CPU's tensors.

Kernels are interpreted or compiled by what the environment says when they are imported. It is as before for every other test, and so is
triton itself, which other libraries have imported already or will.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest

INTERPRET = ("TRITON_INTERPRET", "1")

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    importlib.import_module("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*INTERPRET)
        importlib.import_module("loramux.kernels.triton.ops")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at import, for what triton asks when it runs a kernel, and for its own functions that kernels call."""
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from loramux.kernels.triton.tiles import INTERPRETED

    assert INTERPRETED, "something imported loramux.kernels.triton before this folder's conftest"
    monkeypatch.setenv(*INTERPRET)
    for name, value in vars(language).copy().items():
        if isinstance(value, JITFunction):
            monkeypatch.setattr(language, name, InterpretedFunction(value.fn))
