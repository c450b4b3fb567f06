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

from loramux.kernels.triton.embed import _embed
from loramux.kernels.triton.expand import BLOCK_COLUMNS, _expand, dot_precision
from loramux.kernels.triton.lora import MAX_SPLITS
from loramux.kernels.triton.rows import block_rows_of
from loramux.kernels.triton.shrink import BLOCK_INNER, _shrink
from loramux.kernels.triton.tiles import BLOCK_RANKS

POINTERS = {"shrunk": "*fp32", "vectors": "*fp32", "table": "*i32", "blocks": "*i32", "columns_of": "*i32", "token_ids": "*i64"}
UNALIGNED = {"num_rows", "num_slices", "row_length", "rank_column", "vector_column"}
"""Numbers that may be any; the others are multiples of 16 for real models."""


class Variant(NamedTuple):
    kernel: Any
    constants: dict[str, Any]


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    for num_rows in (1, 1000):
        blocks = {"block_rows": block_rows_of(num_rows), "block_ranks": BLOCK_RANKS}
        columns = {"block_columns": BLOCK_COLUMNS, "precision": dot_precision(dtype)}
        yield Variant(_shrink, {**blocks, "max_rank": 64, "block_inner": BLOCK_INNER, "widen": False})
        yield Variant(_expand, {**blocks, **columns, "max_rank": 64, "num_splits": MAX_SPLITS})
        yield Variant(_embed, {**blocks, **columns})


def compiled(variant: Variant, dtype: str, capability: int) -> Any:
    kernel, constants = variant
    pointers = POINTERS | dict.fromkeys(("x", "y", "pages"), f"*{dtype}")
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    aligned = [at for at, name in enumerate(kernel.arg_names) if name not in constants and name not in UNALIGNED]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def main(dtype: str, capability: str) -> None:
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for variant in variants(torch_dtype):
        built = compiled(variant, dtype, int(capability))
        print(variant.kernel.__name__, built.metadata.shared, len(built.asm["cubin"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
