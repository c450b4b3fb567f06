"""The C++ extension built from `module.cpp`. Tensors are passed as addresses (`Tensor.data_ptr()`) and sizes, unchecked: go through
`ops.py`. Every function releases the interpreter lock.
"""

from enum import Enum

class Isa(Enum):
    SCALAR = 0
    AVX2 = 1
    AVX512 = 2

def supported_isas() -> list[Isa]:
    """What this machine runs, slowest first; SCALAR is always there."""

def apply_bitmask(logits: int, num_rows: int, vocab_size: int, bitmask: int, rows: int, num_masks: int, isa: Isa) -> None:
    """logits[rows[i], t] = -inf in place where bit t of bitmask[i] is 0.

    logits float32 [num_rows, vocab_size]; bitmask int32 [num_masks, ceil(vocab_size / 32)]; rows int64 [num_masks]; all contiguous.
    Raises IndexError where a row is out of range, ValueError for an instruction set that this machine does not run.
    """
