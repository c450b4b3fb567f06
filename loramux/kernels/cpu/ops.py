"""The operations on a CPU: native, and the torch reference for what has no kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loramux.kernels.cpu import _native
from loramux.kernels.cpu.decoder import CpuDecoder
from loramux.kernels.cpu.dtypes import DTYPES
from loramux.kernels.cpu.lora import CpuLoraSlots
from loramux.kernels.cpu.sampling import choose_tokens, row_peaks, token_logprobs
from loramux.kernels.ops import (
    Decoder,
    DecoderShape,
    DecoderWeights,
    LogprobRows,
    LoraLimits,
    LoraShape,
    LoraSlots,
    Quantization,
    SamplingRow,
)
from loramux.kernels.reference.ops import ReferenceOps


class CpuOps:
    """Runs on the fastest instruction set of this machine, or on the one given. Raises ValueError if the machine lacks that one."""

    def __init__(self, isa: _native.Isa | None = None) -> None:
        supported = _native.supported_isas()
        if isa is not None and isa not in supported:
            raise ValueError(f"this machine does not run {isa.name}")
        self.isa = supported[-1] if isa is None else isa
        self.name = f"cpu-{self.isa.name.lower()}"
        self._reference = ReferenceOps()

    def decoder(self, shape: DecoderShape, weights: DecoderWeights, quantization: Quantization | None = None) -> Decoder:
        if shape.dtype in DTYPES:
            return CpuDecoder(shape, weights, quantization, self.isa)
        return self._reference.decoder(shape, weights, quantization)

    def lora_slots(self, shape: LoraShape, limits: LoraLimits) -> LoraSlots:
        return CpuLoraSlots(shape, self.isa) if shape.dtype in DTYPES else self._reference.lora_slots(shape, limits)

    def apply_bitmask(self, logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
        """logits[rows[i], t] = -inf in place where bit t of bitmask[i] is 0.

        logits float32 [R, V]; bitmask int32 [N, ceil(V / 32)]; rows int64 [N], each in [0, R). All contiguous, on the CPU.
        Raises ValueError for any other dtype, shape or layout and IndexError for a row out of range, before anything is written.
        """
        _check("logits", logits, torch.float32, 2)
        num_rows, vocab_size = logits.shape
        _check("rows", rows, torch.int64, 1)
        num_masks = rows.shape[0]
        _check("bitmask", bitmask, torch.int32, 2)
        if bitmask.shape != (num_masks, (vocab_size + 31) // 32):
            raise ValueError(f"bitmask {tuple(bitmask.shape)} does not fit {num_masks} rows and a vocabulary of {vocab_size}")
        _native.apply_bitmask(logits.data_ptr(), num_rows, vocab_size, bitmask.data_ptr(), rows.data_ptr(), num_masks, self.isa)

    def row_peaks(self, logits: torch.Tensor) -> torch.Tensor:
        return row_peaks(logits, self.isa)

    def choose_tokens(self, logits: torch.Tensor, sampling: Sequence[SamplingRow]) -> list[int]:
        return choose_tokens(logits, sampling, self.isa)

    def token_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobRows:
        return token_logprobs(logits, token_ids, k, self.isa)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, num_dims: int) -> None:
    if tensor.dtype != dtype or tensor.dim() != num_dims or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of {num_dims} dimensions on the CPU,"
            f" not {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
