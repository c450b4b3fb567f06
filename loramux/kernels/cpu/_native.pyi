"""The C++ extension built from `module.cpp`. Tensors are passed as addresses (`Tensor.data_ptr()`) and sizes, unchecked: go through the
modules beside. Every function that computes releases the interpreter lock.
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

INPUT_ALIGN: int
"""Rows of a product's x are as long as a multiple of this."""

class PackedWeight:
    """blocks as `pack_weight` fills them, 64-byte aligned. scales float32 [out_features] make them int8; 0 for none. Refers to memory that
    its owner keeps, as all that follow."""

    def __init__(self, *, blocks: int, out_features: int, in_features: int, dtype: Dtype, scales: int) -> None: ...

def packed_weight_bytes(out_features: int, in_features: int, dtype: Dtype, is_int8: bool, /) -> int: ...
def pack_weight(weight: int, out_features: int, in_features: int, dtype: Dtype, is_int8: bool, packed: int, /) -> None:
    """weight [out_features, in_features] of the dtype or int8, contiguous; packed has `packed_weight_bytes`."""

def unpack_weight(packed: PackedWeight, weight: int, /) -> None:
    """weight [out_features, in_features] of the dtype as it was before packing; int8 times its scale."""

def matmul(
    *,
    x: int,
    x_stride: int,
    num_rows: int,
    weight: PackedWeight,
    bias: int,
    y: int,
    y_stride: int,
    y_is_float32: bool,
    isa: Isa,
    num_threads: int,
) -> None:
    """y [num_rows, out_features] = x W^T + bias. x [num_rows, in_features padded to INPUT_ALIGN by zeros]; bias 0 for none.

    Raises ValueError for an instruction set that this machine does not run.
    """

class TeamSize:
    """As `team_size.h` says; for tests."""

    def __init__(self, most: int) -> None: ...
    def choose(self, now: float) -> int: ...
    def observe(self, now: float, seconds: float, cpu_seconds: float) -> None: ...

class AttentionShape:
    """window 0 sees everything."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, window: int, scale: float, dtype: Dtype) -> None: ...

class Linear:
    """bias 0 for none."""

    def __init__(self, weight: PackedWeight, bias: int) -> None: ...

class DecoderLayer:
    """Norms are addresses [hidden], those of heads [head_dim] or 0 for none."""

    def __init__(
        self,
        *,
        input_norm: int,
        qkv: Linear,
        q_norm: int,
        k_norm: int,
        o: Linear,
        post_attention_norm: int,
        gate_up: Linear,
        down: Linear,
    ) -> None: ...

class KvCaches:
    """(keys, values) of each layer, laid out as `attention_kernel.h` says."""

    def __init__(self, layers: Sequence[tuple[int, int]], block_size: int) -> None: ...

class Decoder:
    """One thread at a time uses a decoder. Raises ValueError for an instruction set that this machine does not run."""

    def __init__(
        self,
        attention: AttentionShape,
        *,
        embedding: PackedWeight,
        layers: Sequence[DecoderLayer],
        norm: int,
        head: Linear,
        rms_norm_eps: float,
        isa: Isa,
        num_threads: int,
    ) -> None: ...
    def forward(
        self,
        *,
        num_tokens: int,
        token_ids: int,
        cos: int,
        sin: int,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        block_tables: int,
        table_stride: int,
        kv_slots: int,
        logit_rows: int,
        num_logit_rows: int,
        logits: int,
        lora: LoraPlan | None,
        logit_lora: LoraPlan | None,
        caches: KvCaches,
    ) -> None:
        """`kernels.ops.Decoder.forward`. Raises ValueError for a shape of attention that the kernels don't know."""
