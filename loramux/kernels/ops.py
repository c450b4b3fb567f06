"""The operations a model and a sampler are made of, as one interface; `select.py` chooses who implements it, once, at start.

The torch functions in `kernels/reference/` define each operation; every other implementation must agree with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """Where each sequence's tokens of this step lie in the batch and in the KV blocks. Filled by the runner, once a step, on the CPU.

    Sequence s owns rows [query_starts[s], query_starts[s + 1]) of the batch: the last of its context_lens[s] tokens.
    """

    query_starts: tuple[int, ...]
    """[num_seqs + 1]"""
    context_lens: tuple[int, ...]
    """[num_seqs] tokens, this step's included."""
    block_tables: torch.Tensor
    """int64 [num_seqs, max_blocks]; entries past a sequence's length are 0."""
    kv_slots: torch.Tensor
    """int64 [num_tokens]: block * block_size + offset, where each token's key and value are written."""


class SliceWeights(NamedTuple):
    """One slice of a fused layer, columns [out_start, out_end) of its output: y' = gain * y + (x A^T)[:, ranks] B + shift."""

    rank_start: int
    rank_end: int
    """Rows of the site's stacked A; none for a slice that only shifts."""
    out_start: int
    out_end: int
    b: torch.Tensor
    """[rank_end - rank_start, out_end - out_start]: B transposed, the adapter's scale and `gain` folded in."""
    gain: torch.Tensor | None = None
    """float32 [out_end - out_start]: DoRA's magnitude over norm; None is 1."""
    shift: torch.Tensor | None = None
    """float32 [out_end - out_start]; None is 0."""


@dataclass(frozen=True)
class SiteWeights:
    """What one adapter changes at one linear layer. Matrices are contiguous, in the model's dtype."""

    a: torch.Tensor
    """[sum of ranks, in_features]"""
    slices: tuple[SliceWeights, ...]


@dataclass(frozen=True)
class EmbeddingWeights:
    """What one adapter changes at the embedding: y' = gain * y + A[token] B."""

    a: torch.Tensor
    """[vocab, rank]"""
    b: torch.Tensor
    """[rank, hidden], the adapter's scale and `gain` folded in."""
    gain: torch.Tensor | None = None
    """float32 [hidden]; None is 1."""


@dataclass(frozen=True)
class AdapterWeights:
    """One adapter, bound to one model."""

    sites: tuple[SiteWeights | None, ...]
    """By the site's number; None where the adapter changes nothing."""
    embedding: EmbeddingWeights | None = None


class SiteShape(NamedTuple):
    """A linear layer that adapters may change."""

    in_features: int
    slices: tuple[tuple[int, int], ...]
    """(out_start, out_end) of each."""


@dataclass(frozen=True)
class LoraShape:
    """The sizes of a model, as far as slots depend on them."""

    sites: tuple[SiteShape, ...]
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype


class LoraLimits(NamedTuple):
    """What slots are made for."""

    num_slots: int
    max_rank: int
    max_num_tokens: int
    """Of one batch."""
    memory_bytes: int | None = None
    """Of the device, shared by all slots; None is room for the largest adapter in each. Not asked where slots take no memory."""


class SlotRows(NamedTuple):
    """Rows [start, end) of a batch that the adapter in one slot answers for."""

    start: int
    end: int
    slot: int
    pages: tuple[int, ...]
    """Pages of the slots' memory that the slot has; none where a slot refers to host memory."""
    weights: AdapterWeights
    """As `LoraSlots.prepare` returned them."""


class LoraPlan(Protocol):
    """Which rows of one batch are whose, worked out once and used by every layer. Rows of nobody are left alone."""

    def apply(self, site: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """Change y [T, out] in place by what each row's adapter has at the site; x [T, in_features] is the layer's input."""

    def embed(self, y: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Change embeddings y [T, hidden] in place; token_ids int64 [T]."""


class LoraSlots(Protocol):
    """Adapters on the device. `prepare` may be called from any thread."""

    num_pages: int | None
    """Pages of memory that all slots share; None where slots take none."""

    def prepare(self, weights: AdapterWeights) -> AdapterWeights:
        """The weights in the form that `plan` takes, made once when the adapter is loaded."""

    def num_pages_of(self, weights: AdapterWeights) -> int:
        """Pages that the adapter takes; weights as `prepare` takes them."""

    def plan(self, rows: Sequence[SlotRows]) -> LoraPlan:
        """For one batch; rows are disjoint and in order. Moves what a slot does not hold yet to the device."""


class StepLora(NamedTuple):
    """What adapters change in one forward pass."""

    rows: LoraPlan
    """Of the batch's tokens."""
    logit_rows: LoraPlan
    """Of the rows whose logits are computed."""


class DecoderShape(NamedTuple):
    """The sizes of a decoder: H hidden, Hq query heads, Hkv key/value heads, D head size, I intermediate."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    rms_norm_eps: float
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        """Of attention's scores."""
        return float(self.head_dim**-0.5)


class LinearWeights(NamedTuple):
    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None = None
    """[out]"""


class LayerWeights(NamedTuple):
    """x += o(attention(qkv(norm(x)))); x += down(silu(gate) * up of gate_up(norm(x)))."""

    input_norm: torch.Tensor
    """[H]"""
    qkv: LinearWeights
    """Stacked: [(Hq + 2 * Hkv) * D, H]"""
    q_norm: torch.Tensor | None
    """[D], of each head"""
    k_norm: torch.Tensor | None
    o: LinearWeights
    """[H, Hq * D]"""
    post_attention_norm: torch.Tensor
    gate_up: LinearWeights
    """Stacked: [2 * I, H]"""
    down: LinearWeights
    """[H, I]"""

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        """In the order of their sites."""
        return (self.qkv, self.o, self.gate_up, self.down)


@dataclass(frozen=True)
class DecoderWeights:
    embedding: torch.Tensor
    """[vocab, H]"""
    layers: Iterable[LayerWeights]
    """Taken once, one after another: whoever packs them need not hold them twice."""
    norm: torch.Tensor
    head: LinearWeights
    """[vocab, H]; the embedding itself where they are tied."""


Quantization = Literal["int8"]
"""How matrices of weights are kept: int8 is `reference/quantization.py`. Norms, biases and adapters stay in the model's dtype."""


class Decoder(Protocol):
    """A stack of layers between an embedding and a head, on one device. Adapters' sites are the linear layers in order, the head last."""

    def new_kv_caches(self, num_blocks: int, block_size: int) -> Any:
        """Room for the keys and values of every layer, in the implementation's own layout; what is read before it is written is finite."""

    def forward(
        self,
        token_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_caches: Any,
        attention: AttentionBatch,
        lora: StepLora | None,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run T tokens and write their keys and values.

        token_ids int64 [T]; cos, sin float32 [T, D], both halves of a row equal; logit_rows int64 [R], rows of the batch: all on the CPU.
        -> logits float32 [R, vocab] on the device, the caller's until the next forward.
        """

    def site_weight(self, site: int) -> torch.Tensor:
        """[out, in] in the model's dtype, as a linear layer computes with it. Perhaps a copy."""

    def site_bias(self, site: int) -> torch.Tensor | None:
        """[out]; not a copy."""

    def embedding_weight(self) -> torch.Tensor:
        """[vocab, H]. Perhaps a copy."""


class SamplingRow(NamedTuple):
    """How a row of logits is drawn from. Filled by the sampler."""

    temperature: float
    """0 is greedy, and the others are then not looked at. As float32."""
    top_k: int
    """0 keeps every token."""
    top_p: float
    """1 keeps every token. As float64."""
    min_p: float
    """At most 1; 0 keeps every token. As float32."""
    noise: float
    """In [0, 1): how much of what is kept comes before the token. As float64."""


class LogprobRows(NamedTuple):
    """Log-probabilities of R tokens, each under a row of logits, and of the row's k most likely ones."""

    values: torch.Tensor
    """float32 [R]"""
    ranks: torch.Tensor
    """int64 [R]; 1 is the most likely."""
    top_ids: torch.Tensor
    """int64 [R, k], the most likely first, of equals the lower id."""
    top_values: torch.Tensor
    """float32 [R, k]"""


class Ops(Protocol):
    """One device's implementation of everything."""

    name: str

    def decoder(self, shape: DecoderShape, weights: DecoderWeights, quantization: Quantization | None = None) -> Decoder:
        """The device's decoder over these weights, which are on the device; quantised as they are taken."""

    def lora_slots(self, shape: LoraShape, limits: LoraLimits) -> LoraSlots:
        """The device's slots for adapters of a model. Raises `StartupFailed` where the memory holds no adapter of the largest rank."""

    def apply_bitmask(self, logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
        """logits[rows[i], t] = -inf in place where bit t of bitmask[i] is 0.

        logits float32 [R, V] on the device; bitmask int32 [N, ceil(V / 32)] and rows int64 [N] on the CPU.
        """

    def row_peaks(self, logits: torch.Tensor) -> torch.Tensor:
        """The largest of each row, NaN where it has one. logits float32 [R, V] -> float32 [R]"""

    def choose_tokens(self, logits: torch.Tensor, sampling: Sequence[SamplingRow]) -> list[int]:
        """A token for each row, -1 where no logit is finite or one is NaN or +inf. logits float32 [R, V]; sampling [R] -> [R]

        Drawn by temperature, then min_p, top_k and top_p, each of what the one before left; of equal logits at an edge all are kept.
        Greedy is the first of the most likely. No row depends on another.
        """

    def token_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobRows:
        """Of token_ids int64 [R] under logits float32 [R, V], with the k most likely (V at most). On the CPU.

        What is returned of a row without a finite peak, or with NaN, means nothing.
        """
