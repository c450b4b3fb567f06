"""How a batch's query rows are cut into the pieces that attention's programs take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loramux.kernels.ops import AttentionBatch
from loramux.kernels.triton.paged_attention import HeadShape

BLOCK_ROWS = 64
"""Query rows times heads of a key head, in a piece of a prompt."""
MAX_SPLITS = 32


class HostPieces(NamedTuple):
    """A `PieceGroup` before it is on the device."""

    pieces: list[tuple[int, int, int, int]]
    block_queries: int
    num_splits: int


class Cutter(NamedTuple):
    """Cuts batches for one model on one device."""

    heads: HeadShape
    block_keys: int
    num_programs: int
    """That keep the device busy."""

    def cut(self, batch: AttentionBatch, table_starts: Sequence[int]) -> tuple[HostPieces, ...]:
        """Decodes and chunks of prompts, those that there are; table_starts [num_seqs], where a sequence's blocks begin."""
        decodes: list[tuple[int, int, int, int]] = []
        chunks: list[tuple[int, int, int, int]] = []
        height = max(1, BLOCK_ROWS // self.heads.group_block)
        for s, (context_len, table_start) in enumerate(zip(batch.context_lens, table_starts, strict=True)):
            start, end = batch.query_starts[s], batch.query_starts[s + 1]
            position = context_len - end
            if end - start == 1:
                decodes.append((start, 1, position + start, table_start))
            else:
                chunks += [(row, min(height, end - row), position + row, table_start) for row in range(start, end, height)]
        return tuple(self._group(pieces, queries) for pieces, queries in ((decodes, 1), (chunks, height)) if pieces)

    def _group(self, pieces: list[tuple[int, int, int, int]], block_queries: int) -> HostPieces:
        longest = max(position + num_rows for _, num_rows, position, _ in pieces)
        return HostPieces(pieces, block_queries, self.num_splits(len(pieces), longest))

    def num_splits(self, num_pieces: int, longest_context: int) -> int:
        """A power of two: as many as keep the device busy, none of them empty for the longest context."""
        most = min(MAX_SPLITS, self.num_programs // (num_pieces * self.heads.num_kv_heads), -(-longest_context // self.block_keys))
        return 1 << (max(1, most).bit_length() - 1)
