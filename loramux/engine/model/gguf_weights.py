"""Tensors of a GGUF file under their Hugging Face names, dequantised to float32 as they are read."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from loramux.errors import StartupFailed

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "rope_freqs": "rope_freqs"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LENGTH = struct.Struct("=Q")
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class TensorReader(gguf.GGUFReader):
    """Steps over arrays of strings (vocabulary, merges), which take the library 4 s of every start for a vocabulary of 50,000."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
        item_type = self._get(orig_offs, np.uint32)[0]
        if (raw_type, item_type, self.byte_order) != (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, "I"):
            return super()._get_field_parts(orig_offs, raw_type)
        data: Any = self.data.data
        (count,) = _LENGTH.unpack_from(data, orig_offs + 4)
        offset = orig_offs + 4 + _LENGTH.size
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, offset)
            offset += _LENGTH.size + length
        return offset - orig_offs, [], [], [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]


class GGUFSource:
    """The file stays memory-mapped; a name the table does not know keeps its own, so that the model refuses it."""

    def __init__(self, path: Path, num_heads: int, num_kv_heads: int) -> None:
        self._path = path
        try:
            reader = TensorReader(path)
        except (ValueError, OSError, IndexError, KeyError, struct.error) as error:
            raise StartupFailed(f"{path} can't be read as GGUF ({error}); download it again") from error
        architecture = reader.fields["general.architecture"].contents()
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
        self._permuted_heads = {"q_proj": num_heads, "k_proj": num_kv_heads} if architecture == "llama" else {}

    def names(self) -> Iterable[str]:
        return self._tensors

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise StartupFailed(f"tensor {tensor.name} in {self._path} is quantised as {kind}, which can't be read") from error
        restored = torch.tensor(values.reshape(tuple(int(size) for size in reversed(tensor.shape))))
        num_heads = self._permuted_heads.get(name.split(".")[-2])
        return restored if num_heads is None else _unpermute(restored, num_heads)


def _hugging_face_name(name: str) -> str:
    if match := _LAYER_NAME.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}" if part in _IN_LAYER else name
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Llama's GGUF interleaves each head's two halves for a rotation of neighbours; the decoder rotates halves."""
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
