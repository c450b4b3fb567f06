"""`reference/decoder.py` natively: one call a forward pass, over weights packed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loramux.kernels.cpu import _native
from loramux.kernels.cpu.addresses import address
from loramux.kernels.cpu.dtypes import DTYPES
from loramux.kernels.cpu.lora import CpuLoraPlan
from loramux.kernels.cpu.matmul import PackedWeight
from loramux.kernels.ops import AttentionBatch, DecoderShape, DecoderWeights, LayerWeights, LinearWeights, LoraPlan, Quantization, StepLora


@dataclass(frozen=True)
class CpuKvCaches:
    """Keys and values of every layer, laid out as `attention.h` says; zeroed."""

    tensors: list[torch.Tensor]
    native: _native.KvCaches


class CpuDecoder:
    """Implements `kernels.ops.Decoder` for the dtypes of `DTYPES`. One thread at a time uses it, on as many threads as torch has.

    A token's logits are the same bit for bit however many threads there are.
    """

    def __init__(self, shape: DecoderShape, weights: DecoderWeights, quantization: Quantization | None, isa: _native.Isa) -> None:
        """Raises ValueError where a weight is not contiguous, on the CPU, of the shape's dtype and sizes."""
        self._shape = shape
        self._pack = PackedWeight.pack if quantization is None else PackedWeight.quantize
        self._vectors: list[torch.Tensor] = []
        self._sites: list[tuple[PackedWeight, torch.Tensor | None]] = []
        layers = [self._layer(layer) for layer in weights.layers]
        self._num_layers = len(layers)
        head = self._linear(weights.head, shape.vocab_size, shape.hidden_size)
        is_tied = weights.head.weight is weights.embedding
        self._embedding = self._sites[-1][0] if is_tied else self._packed(weights.embedding, shape.vocab_size, shape.hidden_size)
        attention = _native.AttentionShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.sliding_window or 0,
            scale=shape.scale,
            dtype=DTYPES[shape.dtype],
        )
        self._native = _native.Decoder(
            attention,
            embedding=self._embedding.native,
            layers=layers,
            norm=self._vector(weights.norm, shape.hidden_size),
            head=head,
            rms_norm_eps=shape.rms_norm_eps,
            isa=isa,
            num_threads=torch.get_num_threads(),
        )
        self._logits = torch.empty(0, shape.vocab_size)

    def new_kv_caches(self, num_blocks: int, block_size: int) -> CpuKvCaches:
        shape = self._shape
        size = (num_blocks, shape.num_kv_heads, block_size * shape.head_dim)
        tensors = [torch.zeros(size, dtype=shape.dtype) for _ in range(2 * self._num_layers)]
        addresses = [tensor.data_ptr() for tensor in tensors]
        return CpuKvCaches(tensors, _native.KvCaches(list(zip(addresses[::2], addresses[1::2], strict=True)), block_size))

    def site_weight(self, site: int) -> torch.Tensor:
        return self._sites[site][0].unpack()

    def site_bias(self, site: int) -> torch.Tensor | None:
        return self._sites[site][1]

    def embedding_weight(self) -> torch.Tensor:
        return self._embedding.unpack()

    def forward(
        self,
        token_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_caches: CpuKvCaches,
        attention: AttentionBatch,
        lora: StepLora | None,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Raises ValueError where a tensor's dtype, shape or layout is another. What indices point at is the caller's to know."""
        num_tokens, num_seqs = len(token_ids), len(attention.context_lens)
        table_size = (num_seqs, attention.block_tables.shape[1])
        logits = self._logits_of(len(logit_rows))
        rows, of_logits = lora or (None, None)
        self._native.forward(
            num_tokens=num_tokens,
            token_ids=address(token_ids, torch.int64, (num_tokens,)),
            cos=address(cos, torch.float32, (num_tokens, self._shape.head_dim)),
            sin=address(sin, torch.float32, (num_tokens, self._shape.head_dim)),
            query_starts=attention.query_starts,
            context_lens=attention.context_lens,
            block_tables=address(attention.block_tables, torch.int64, table_size),
            table_stride=table_size[1],
            kv_slots=address(attention.kv_slots, torch.int64, (num_tokens,)),
            logit_rows=address(logit_rows, torch.int64, (len(logit_rows),)),
            num_logit_rows=len(logit_rows),
            logits=logits.data_ptr(),
            lora=_native_plan(rows),
            logit_lora=_native_plan(of_logits),
            caches=kv_caches.native,
        )
        return logits

    def _logits_of(self, num_rows: int) -> torch.Tensor:
        """The same memory at every step: three megabytes of new pages cost more than the head's product."""
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self._shape.vocab_size)
        return self._logits[:num_rows]

    def _layer(self, layer: LayerWeights) -> _native.DecoderLayer:
        shape = self._shape
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return _native.DecoderLayer(
            input_norm=self._vector(layer.input_norm, shape.hidden_size),
            qkv=self._linear(layer.qkv, query_size + 2 * kv_size, shape.hidden_size),
            q_norm=self._vector(layer.q_norm, shape.head_dim),
            k_norm=self._vector(layer.k_norm, shape.head_dim),
            o=self._linear(layer.o, shape.hidden_size, query_size),
            post_attention_norm=self._vector(layer.post_attention_norm, shape.hidden_size),
            gate_up=self._linear(layer.gate_up, 2 * shape.intermediate_size, shape.hidden_size),
            down=self._linear(layer.down, shape.hidden_size, shape.intermediate_size),
        )

    def _linear(self, linear: LinearWeights, out_features: int, in_features: int) -> _native.Linear:
        """Of the next site."""
        packed = self._packed(linear.weight, out_features, in_features)
        self._sites.append((packed, linear.bias))
        return _native.Linear(packed.native, self._vector(linear.bias, out_features))

    def _packed(self, weight: torch.Tensor, out_features: int, in_features: int) -> PackedWeight:
        address(weight, self._shape.dtype, (out_features, in_features))
        return self._pack(weight)

    def _vector(self, vector: torch.Tensor | None, size: int) -> int:
        """Its address, kept alive; 0 for none."""
        if vector is None:
            return 0
        self._vectors.append(vector)
        return address(vector, self._shape.dtype, (size,))


def _native_plan(plan: LoraPlan | None) -> _native.LoraPlan | None:
    if plan is None:
        return None
    if not isinstance(plan, CpuLoraPlan):
        raise ValueError("a plan of other slots than this device's")
    return plan.native
