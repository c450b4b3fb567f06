"""The C++ extension built from `module.cpp`. Tensors are passed as addresses (`Tensor.data_ptr()`) and sizes, unchecked: go through
`ops.py` and `lora.py`. Every function that computes releases the interpreter lock.
"""

from collections.abc import Sequence
from enum import Enum

class Isa(Enum):
    SCALAR = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4

def supported_isas() -> list[Isa]:
    """What this machine runs, slowest first; SCALAR is always there."""

def apply_bitmask(logits: int, num_rows: int, vocab_size: int, bitmask: int, rows: int, num_masks: int, isa: Isa) -> None:
    """logits[rows[i], t] = -inf in place where bit t of bitmask[i] is 0.

    logits float32 [num_rows, vocab_size]; bitmask int32 [num_masks, ceil(vocab_size / 32)]; rows int64 [num_masks]; all contiguous.
    Raises IndexError where a row is out of range, ValueError for an instruction set that this machine does not run.
    """

def row_peaks(logits: int, num_rows: int, vocab_size: int, peaks: int, isa: Isa, num_threads: int, /) -> None:
    """peaks float32 [num_rows] gets the largest of each row of logits float32 [num_rows, vocab_size], NaN where it has one."""

def choose_tokens(
    logits: int,
    num_rows: int,
    vocab_size: int,
    sampling: Sequence[tuple[float, int, float, float, float]],
    isa: Isa,
    num_threads: int,
    /,
) -> list[int]:
    """What is drawn from each row of logits float32 [num_rows, vocab_size], -1 where it has no finite peak or NaN.

    sampling [num_rows]: (temperature, top_k, top_p, min_p, noise). Raises ValueError for another number of rows.
    """

def token_logprobs(
    logits: int,
    num_rows: int,
    vocab_size: int,
    token_ids: int,
    values: int,
    ranks: int,
    k: int,
    top_ids: int,
    top_values: int,
    isa: Isa,
    num_threads: int,
    /,
) -> None:
    """values float32, ranks int64 [num_rows], top_ids int64, top_values float32 [num_rows, k] of token_ids int64 [num_rows].

    Raises IndexError where a token is not in the vocabulary, ValueError for a k that is not from 0 to vocab_size.
    """

class Dtype(Enum):
    FLOAT32 = 0
    BFLOAT16 = 1

class LoraSlice:
    """Columns [out_start, out_end) of a layer's output.

    b [rank_end - rank_start, out_end - out_start] of the plan's dtype; gain, shift float32 [out_end - out_start], or 0 for none.
    """

    def __init__(self, *, rank_start: int, rank_end: int, out_start: int, out_end: int, b: int, gain: int, shift: int) -> None: ...

class LoraSite:
    """What one adapter changes at one linear layer. a [num_ranks, in_features] of the plan's dtype; slices share no column."""

    def __init__(self, *, a: int, num_ranks: int, in_features: int, out_features: int, slices: Sequence[LoraSlice]) -> None: ...

class LoraEmbedding:
    """What one adapter changes at the embedding. a [vocab_size, ranks] of the plan's dtype; slice has the ranks from 0 and every column."""

    def __init__(self, *, a: int, vocab_size: int, slice: LoraSlice) -> None: ...

class LoraAdapter:
    """Refers to memory that its owner keeps."""

    def __init__(self, sites: Sequence[LoraSite | None], embedding: LoraEmbedding | None) -> None: ...

class LoraPlan:
    """Rows (start, end, adapter) of one batch; the adapters outlive the plan. One thread at a time uses a plan.

    Raises ValueError where rows are empty, out of order or overlap, and for an instruction set that this machine does not run.
    """

    def __init__(self, segments: Sequence[tuple[int, int, LoraAdapter]], dtype: Dtype, isa: Isa) -> None: ...
    def apply(self, site: int, y: int, y_rows: int, y_columns: int, x: int, x_rows: int, x_columns: int, num_threads: int, /) -> None:
        """Change y [y_rows, y_columns] in place by x [x_rows, x_columns], both of the plan's dtype.

        Raises ValueError, before anything is written, where one does not fit the layer or the segments.
        """

    def embed(self, y: int, y_rows: int, y_columns: int, token_ids: int, num_tokens: int, num_threads: int, /) -> None:
        """Change embeddings y [y_rows, y_columns] in place; token_ids int64 [num_tokens].

        Raises ValueError, before anything is written, where one does not fit or a token is not in the vocabulary.
        """
