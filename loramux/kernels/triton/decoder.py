"""`reference/decoder.py` on CUDA: matrix products by cuBLAS, everything between them in fused kernels, decode steps from CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from loramux.kernels.ops import AttentionBatch, DecoderShape, DecoderWeights, LayerWeights, LinearWeights, LoraPlan, Quantization, StepLora
from loramux.kernels.triton.add_rms_norm import add_rms_norm, add_rms_norm_rows
from loramux.kernels.triton.graphs import MAX_ROWS, Capture, CudaCapture, Graphs, bucket_of, call_again
from loramux.kernels.triton.linear import Linear, linear
from loramux.kernels.triton.lora import TritonLoraPlan
from loramux.kernels.triton.paged_attention import HeadShape, block_keys_of, paged_attention
from loramux.kernels.triton.pieces import Cutter, HostPieces
from loramux.kernels.triton.rope_cache import KvCache, rope_cache
from loramux.kernels.triton.rows import block_rows_of
from loramux.kernels.triton.silu_mul import silu_mul
from loramux.kernels.triton.step_inputs import HostInputs, StepInputs, flat_tables, pack

LAYER_SITES = 4
"""Linear layers of a layer."""

PROGRAMS_PER_PROCESSOR = 4
"""Of attention over a decode step, which waits for memory."""


@dataclass(frozen=True, eq=False)
class KvCaches:
    """Of every layer, with one block more than asked for, which rows that pad a batch write to."""

    layers: tuple[KvCache, ...]
    num_blocks: int
    block_size: int
    graphs: Graphs

    @property
    def scratch_block(self) -> int:
        return self.num_blocks


class _Layer(NamedTuple):
    """A layer's norms; its matrices are sites."""

    input_norm: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    """Of q and k."""
    post_attention_norm: torch.Tensor

    @classmethod
    def of(cls, layer: LayerWeights) -> _Layer:
        head_norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        return cls(layer.input_norm, head_norms, layer.post_attention_norm)


class TritonDecoder:
    """Implements `kernels.ops.Decoder`. One thread at a time uses it. Interpreted, it runs on a CPU's tensors."""

    def __init__(
        self, shape: DecoderShape, weights: DecoderWeights, quantization: Quantization | None = None, capture: Capture | None = None
    ) -> None:
        """Matrices are quantised as they are taken, one layer after another; a tied head stays tied."""
        self._shape = shape
        self._norm = weights.norm
        self._layers: list[_Layer] = []
        self._sites: list[Linear] = []
        for layer in weights.layers:
            self._layers.append(_Layer.of(layer))
            self._sites += (linear(each, quantization) for each in layer.linears)
        head = linear(weights.head, quantization)
        self._sites.append(head)
        is_tied = weights.head.weight is weights.embedding
        self._embedding = head if is_tied else linear(LinearWeights(weights.embedding), quantization)
        self._device = weights.embedding.device
        self._capture = capture or (CudaCapture() if self._device.type == "cuda" else call_again)
        self._heads = HeadShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._cutter = Cutter(self._heads, block_keys_of(shape.head_dim, shape.dtype), _num_programs(self._device))

    def new_kv_caches(self, num_blocks: int, block_size: int) -> KvCaches:
        """Zeroed, so that what a row of padding reads is finite."""
        size = (num_blocks + 1, self._shape.num_kv_heads, block_size, self._shape.head_dim)
        layers = tuple(KvCache(*(torch.zeros(size, dtype=self._shape.dtype, device=self._device) for _ in range(2))) for _ in self._layers)
        graphs = Graphs(_num_graph_words(self._shape, num_blocks), self._device, self._capture)
        return KvCaches(layers, num_blocks, block_size, graphs)

    def site_weight(self, site: int) -> torch.Tensor:
        return self._sites[site].whole()

    def site_bias(self, site: int) -> torch.Tensor | None:
        return self._sites[site].bias

    def embedding_weight(self) -> torch.Tensor:
        return self._embedding.whole()

    @torch.no_grad()
    def forward(
        self,
        token_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_caches: KvCaches,
        attention: AttentionBatch,
        lora: StepLora | None,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        tables, starts = flat_tables(attention, kv_caches.block_size, kv_caches.scratch_block)
        inputs = HostInputs(
            token_ids=token_ids.numpy().astype(np.int32),
            kv_slots=attention.kv_slots.numpy().astype(np.int32),
            cos=cos.numpy(),
            sin=sin.numpy(),
            logit_rows=logit_rows.numpy().astype(np.int32),
            row_blocks=np.zeros((0, 3), dtype=np.int32),
            groups=self._cutter.cut(attention, starts),
            block_tables=tables,
        )
        logits = self._replayed(inputs, kv_caches, lora)
        return self._eager(inputs, kv_caches, lora) if logits is None else logits

    def _eager(self, inputs: HostInputs, caches: KvCaches, lora: StepLora | None) -> torch.Tensor:
        packed = pack(inputs, pinned=self._device.type == "cuda")
        return self._run(inputs.views(packed.to(self._device, non_blocking=True)), caches, lora)

    def _replayed(self, inputs: HostInputs, caches: KvCaches, lora: StepLora | None) -> torch.Tensor | None:
        """The step from a graph; None where it is no decode, or too large for one."""
        num_rows = len(inputs.token_ids)
        bucket = bucket_of(num_rows)
        plan = lora.rows if lora is not None else None
        if not _is_decode(inputs) or bucket > MAX_ROWS or (plan is not None and not _can_record(plan, bucket)):
            return None
        longest = caches.num_blocks * caches.block_size
        inputs = padded(inputs, bucket, caches.scratch_block * caches.block_size, self._cutter.num_splits(bucket, longest))
        buffers = None
        if isinstance(plan, TritonLoraPlan):
            inputs = inputs._replace(row_blocks=np.array(plan.numbers(bucket), dtype=np.int32))
            buffers = plan.buffers
        packed = pack(inputs, pinned=self._device.type == "cuda")
        if not caches.graphs.fits(packed):
            return None
        step = inputs.views(caches.graphs.buffer)
        recorded = None
        if buffers is not None:
            same = TritonLoraPlan(buffers, block_rows_of(bucket), step.row_blocks)
            recorded = StepLora(same, same)
        return caches.graphs.run((bucket, buffers), packed, lambda: self._run(step, caches, recorded))[:num_rows]

    def _run(self, step: StepInputs, caches: KvCaches, lora: StepLora | None) -> torch.Tensor:
        """Every tensor is on the device; nothing here waits for it or asks what it holds."""
        rows, of_logits = lora or (None, None)
        eps = self._shape.rms_norm_eps
        x, delta = self._embedding.rows(step.token_ids), None
        if rows is not None:
            rows.embed(x, step.token_ids)
        for index, (layer, cache) in enumerate(zip(self._layers, caches.layers, strict=True)):
            site = LAYER_SITES * index
            delta = self._attend(site, layer, add_rms_norm(x, delta, layer.input_norm, eps), cache, step, rows)
            normed = add_rms_norm(x, delta, layer.post_attention_norm, eps)
            delta = self._linear(site + 3, silu_mul(self._linear(site + 2, normed, rows)), rows)
        normed = add_rms_norm_rows(x, delta, step.logit_rows, self._norm, eps)
        return self._linear(len(self._sites) - 1, normed, of_logits).float()

    def _linear(self, site: int, x: torch.Tensor, lora: LoraPlan | None) -> torch.Tensor:
        y = self._sites[site].apply(x)
        if lora is not None:
            lora.apply(site, y, x)
        return y

    def _attend(self, site: int, layer: _Layer, x: torch.Tensor, cache: KvCache, step: StepInputs, lora: LoraPlan | None) -> torch.Tensor:
        shape = self._shape
        qkv = self._linear(site, x, lora)
        rope_cache(qkv, layer.head_norms, step.cos, step.sin, cache, step.kv_slots, shape.rms_norm_eps)
        attended = qkv.new_empty((len(qkv), shape.num_heads * shape.head_dim))
        for group in step.groups:
            paged_attention(attended, qkv, cache, group, step.block_tables, self._heads, shape.scale, shape.sliding_window)
        return self._linear(site + 1, attended, lora)


def padded(inputs: HostInputs, bucket: int, scratch_slot: int, num_splits: int) -> HostInputs:
    """A decode with rows more, which attend to themselves alone in the scratch block: the first of the block tables."""
    num_rows = len(inputs.token_ids)
    more = ((0, bucket - num_rows),)
    filler = [(row, 1, 0, 0) for row in range(num_rows, bucket)]
    (group,) = inputs.groups
    return inputs._replace(
        token_ids=np.pad(inputs.token_ids, more),
        kv_slots=np.pad(inputs.kv_slots, more, constant_values=scratch_slot),
        cos=np.pad(inputs.cos, (*more, (0, 0))),
        sin=np.pad(inputs.sin, (*more, (0, 0))),
        logit_rows=np.arange(bucket, dtype=np.int32),
        groups=(HostPieces(group.pieces + filler, 1, num_splits),),
    )


def _is_decode(inputs: HostInputs) -> bool:
    """One token of each sequence, and the logits of each."""
    num_rows = len(inputs.token_ids)
    is_single = len(inputs.groups) == 1 and len(inputs.groups[0].pieces) == num_rows
    return is_single and np.array_equal(inputs.logit_rows, np.arange(num_rows))


def _can_record(plan: LoraPlan, bucket: int) -> bool:
    return isinstance(plan, TritonLoraPlan) and bucket <= plan.buffers.limits.max_num_tokens


def _num_programs(device: torch.device) -> int:
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return PROGRAMS_PER_PROCESSOR * num_processors


def _num_graph_words(shape: DecoderShape, num_blocks: int) -> int:
    """Room for the numbers of the largest recorded step, and for twice as many blocks as there are, since sequences may share some."""
    per_row = 2 * shape.head_dim + 16
    return MAX_ROWS * per_row + 2 * num_blocks + 1024
