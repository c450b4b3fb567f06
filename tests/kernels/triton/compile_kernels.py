"""Compiles every kernel to machine code for a GPU that need not be there: `python compile_kernels.py DTYPE CAPABILITY`.

Prints one line a kernel: name, bytes of shared memory, bytes of code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.kernels.triton.add_rms_norm import _add_rms_norm
from loramux.kernels.triton.apply_bitmask import _apply_bitmask
from loramux.kernels.triton.embed import _embed
from loramux.kernels.triton.expand import BLOCK_COLUMNS, _expand, dot_precision
from loramux.kernels.triton.int8_matmul import BLOCK_INNER as INT8_BLOCK_INNER
from loramux.kernels.triton.int8_matmul import _int8_matmul
from loramux.kernels.triton.lora import MAX_SPLITS
from loramux.kernels.triton.paged_attention import _combine, _paged_attention, block_keys_of
from loramux.kernels.triton.rope_cache import _rope_cache
from loramux.kernels.triton.rows import block_rows_of
from loramux.kernels.triton.sampling import BLOCK_TOKENS, _draw
from loramux.kernels.triton.shrink import BLOCK_INNER, _shrink
from loramux.kernels.triton.silu_mul import _silu_mul
from loramux.kernels.triton.tiles import BLOCK_RANKS

POINTERS = {
    **dict.fromkeys(("shrunk", "vectors", "cos", "sin", "partial", "lse"), "*fp32"),
    "values": "*i8",
    "scales": "*fp32",
    **dict.fromkeys(("table", "blocks", "columns_of", "token_ids", "rows", "kv_slots", "pieces", "block_tables"), "*i32"),
    **dict.fromkeys(("eps", "limit", "scale"), "fp32"),
}
IN_MODEL_DTYPE = (
    *("x", "y", "pages", "residual", "delta", "weight", "gate_up", "qkv", "q_norm", "k_norm"),
    *("k_cache", "v_cache", "q", "out"),
)
UNALIGNED = {
    "num_rows",
    "num_slices",
    "row_length",
    "rank_column",
    "vector_column",
    "num_heads",
    "num_kv_heads",
    "window",
    "bitmask",
    "num_words",
}
"""Numbers that may be any; the others are multiples of 16 for real models."""


class Variant(NamedTuple):
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any] = {}
    pointers: dict[str, str] = {}
    """Where they are not as usual."""


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    yield from lora_variants(dtype)
    yield Variant(_add_rms_norm, {"has_delta": True, "has_rows": True, "block": 4096}, {"num_warps": 8})
    yield Variant(_add_rms_norm, {"delta": None, "rows": None, "has_delta": False, "has_rows": False, "block": 1024})
    yield Variant(_silu_mul, {"block": 1024})
    yield Variant(_apply_bitmask, {"block": 1024}, pointers={"logits": "*fp32", "bitmask": "*i32"})
    draws = {"token_ids": "*i64", "logits": "*fp32", "peaks": "*fp32", "rows": "*fp64"}
    yield Variant(_draw, {"block": BLOCK_TOKENS}, {"num_warps": 16, "enable_fp_fusion": False}, draws)
    stages = 3 if dtype.itemsize == 2 else 2
    for block_rows in (16, 64):
        size = {"block_rows": block_rows, "block_columns": 64, "block_inner": INT8_BLOCK_INNER, "widen": False}
        yield Variant(_int8_matmul, {"bias": None, "has_bias": False, **size}, {"num_stages": stages})
    for head_dim in (64, 80, 128):
        size = {"head_dim": head_dim, "half_block": triton.next_power_of_2(head_dim // 2)}
        yield Variant(_rope_cache, {"has_norms": True, **size}, {"num_warps": 1})
        yield Variant(_rope_cache, {"q_norm": None, "k_norm": None, "has_norms": False, **size}, {"num_warps": 1})
        yield from attention_variants(head_dim, dtype)


def lora_variants(dtype: torch.dtype) -> Iterator[Variant]:
    for num_rows in (1, 1000):
        blocks = {"block_rows": block_rows_of(num_rows), "block_ranks": BLOCK_RANKS}
        columns = {"block_columns": BLOCK_COLUMNS, "precision": dot_precision(dtype)}
        yield Variant(_shrink, {**blocks, "max_rank": 64, "block_inner": BLOCK_INNER, "widen": False})
        yield Variant(_expand, {**blocks, **columns, "max_rank": 64, "num_splits": MAX_SPLITS})
        yield Variant(_embed, {**blocks, **columns})


def attention_variants(head_dim: int, dtype: torch.dtype) -> Iterator[Variant]:
    """A decode that is split and a chunk that is not, of 4 query heads a key head."""
    size = {"head_dim": head_dim, "head_block": triton.next_power_of_2(head_dim)}
    group = {"group": 4, "group_block": 4, "block_keys": block_keys_of(head_dim, dtype), "block_size": 32, "widen": False}
    options = {"num_warps": 4, "num_stages": 2}
    split = {"has_window": False, "num_splits": 8, "block_rows": 16}
    yield Variant(_paged_attention, {**size, **group, **split}, options, {"out": "*fp32"})
    yield Variant(_paged_attention, {**size, **group, "has_window": True, "num_splits": 1, "block_rows": 64}, options)
    yield Variant(_combine, {**size, "block_queries": 1, "num_splits": 8}, {"num_warps": 1})


def compiled(variant: Variant, dtype: str, capability: int) -> Any:
    kernel, constants, options, own_pointers = variant
    pointers = POINTERS | dict.fromkeys(IN_MODEL_DTYPE, f"*{dtype}") | own_pointers
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    aligned = [at for at, name in enumerate(kernel.arg_names) if signature[name] not in ("constexpr", "fp32") and name not in UNALIGNED]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main(dtype: str, capability: str) -> None:
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for variant in variants(torch_dtype):
        built = compiled(variant, dtype, int(capability))
        print(variant.kernel.__name__, built.metadata.shared, len(built.asm["cubin"]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
