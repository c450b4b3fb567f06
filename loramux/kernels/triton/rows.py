"""Which slot answers for which rows of a batch, in the blocks of rows that programs take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from loramux.kernels.ops import LoraLimits, SlotRows

_NOBODY = (-1, 0, 0)

FEW_ROWS = 256
"""Up to here a block is as small as a tensor core takes, since most segments are a few rows of a decode step."""


def block_rows_of(num_rows: int) -> int:
    return 16 if num_rows <= FEW_ROWS else 64


class RowBlocks:
    """A table of one shape and address, refilled for every batch; launches over it depend on the number of rows alone."""

    def __init__(self, limits: LoraLimits, block_rows: int, device: torch.device, table: torch.Tensor | None = None) -> None:
        """A `table` int32 [N, 3] of the caller's is filled by the caller, with `numbers`."""
        self.block_rows = block_rows
        self._limits = limits
        if table is None:
            table = torch.empty((self.num_blocks(limits.max_num_tokens), 3), dtype=torch.int32, device=device)
        self.table = table
        """(slot, start, end); slot -1 after the last."""

    def num_blocks(self, num_rows: int) -> int:
        """As many as there may be: each slot's last block may be part of one."""
        return min(num_rows, num_rows // self.block_rows + self._limits.num_slots)

    def fill(self, rows: Sequence[SlotRows]) -> None:
        """rows have been checked."""
        host = torch.tensor(self.numbers(rows, len(self.table)), dtype=torch.int32).view(-1, 3)
        self.table.copy_(host.pin_memory() if self.table.is_cuda else host, non_blocking=True)

    def numbers(self, rows: Sequence[SlotRows], num_blocks: int) -> list[tuple[int, int, int]]:
        """A table of so many blocks."""
        blocks = list(self._blocks(rows))
        return blocks + [_NOBODY] * (num_blocks - len(blocks))

    def _blocks(self, rows: Sequence[SlotRows]) -> Iterator[tuple[int, int, int]]:
        for each in rows:
            for start in range(each.start, each.end, self.block_rows):
                yield each.slot, start, min(start + self.block_rows, each.end)

    def check(self, rows: Sequence[SlotRows]) -> None:
        """Raises ValueError where rows are out of order, out of range, or those of one slot lie apart."""
        last = 0
        for each in rows:
            if not last <= each.start < each.end <= self._limits.max_num_tokens:
                raise ValueError(f"rows {each.start} to {each.end} after row {last}, of at most {self._limits.max_num_tokens}")
            last = each.end
        slots = {each.slot for each in rows}
        if len(slots) < len(rows) or not slots <= set(range(self._limits.num_slots)):
            raise ValueError(f"slots {[each.slot for each in rows]} of {self._limits.num_slots}, each of them once")
