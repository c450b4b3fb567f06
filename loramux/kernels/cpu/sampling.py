"""`reference/sampling.py` in C++: one call for all rows, which its threads share out. Arguments are checked here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loramux.kernels.cpu import _native
from loramux.kernels.cpu.addresses import address, contiguous_address
from loramux.kernels.ops import LogprobRows, SamplingRow


def row_peaks(logits: torch.Tensor, isa: _native.Isa) -> torch.Tensor:
    """The largest of each row, NaN where it has one. logits float32 [R, V], contiguous, on the CPU -> float32 [R]. Raises ValueError."""
    peaks = torch.empty(len(logits))
    _native.row_peaks(*_rows(logits), peaks.data_ptr(), isa, torch.get_num_threads())
    return peaks


def choose_tokens(logits: torch.Tensor, sampling: Sequence[SamplingRow], isa: _native.Isa) -> list[int]:
    """As `Ops.choose_tokens`; logits contiguous, on the CPU. Raises ValueError for any other layout, and for another number of rows."""
    rows = _rows(logits)
    return _native.choose_tokens(*rows, sampling, isa, torch.get_num_threads())


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int, isa: _native.Isa) -> LogprobRows:
    """As `Ops.token_logprobs`; both contiguous, on the CPU. Raises ValueError for any other layout."""
    rows = _rows(logits)
    k = min(k, rows[2])
    num_rows = rows[1]
    values, ranks = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    top_ids, top_values = torch.empty(num_rows, k, dtype=torch.int64), torch.empty(num_rows, k)
    _native.token_logprobs(
        *rows,
        address(token_ids, torch.int64, (num_rows,)),
        values.data_ptr(),
        ranks.data_ptr(),
        k,
        top_ids.data_ptr(),
        top_values.data_ptr(),
        isa,
        torch.get_num_threads(),
    )
    return LogprobRows(values, ranks, top_ids, top_values)


def _rows(logits: torch.Tensor) -> tuple[int, int, int]:
    """Address and shape."""
    num_rows, vocab_size = logits.shape
    return contiguous_address(logits, torch.float32), num_rows, vocab_size
