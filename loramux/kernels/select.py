"""Chooses who implements the operations, once, at start. Nothing after it asks which device it is on."""

from __future__ import annotations

import logging

from loramux.kernels.ops import Ops
from loramux.kernels.reference.ops import ReferenceOps

log = logging.getLogger(__name__)


def select_ops(device: str) -> Ops:
    """The fastest operations for a torch device: native ones on a CPU, Triton on CUDA, the torch reference where there are none."""
    return _cpu_ops() if device == "cpu" else _cuda_ops(device)


def _cpu_ops() -> Ops:
    try:
        from loramux.kernels.cpu.ops import CpuOps
    except ImportError as error:
        log.warning("the native CPU kernels are not built, running on the torch reference; install again with a C++ compiler (%s)", error)
        return ReferenceOps()
    return CpuOps()


def _cuda_ops(device: str) -> Ops:
    try:
        from loramux.kernels.triton.ops import TritonOps
    except ImportError as error:
        log.warning("triton is missing, running on the torch reference; install loramux[cuda] (%s)", error)
        return ReferenceOps()
    return TritonOps(device)
