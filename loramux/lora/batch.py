"""Which rows of a batch belong to which adapter. Built anew every step, so nothing leaks from one to the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from loramux.kernels.ops import SlotRows
from loramux.lora.types import LoraSegment


def slot_rows(segments: Sequence[LoraSegment]) -> list[SlotRows]:
    """Neighbouring segments of one adapter become one.

    Segments are in order of row and disjoint; rows of no segment are the base's. Raises ValueError otherwise.
    """
    merged: list[SlotRows] = []
    for start, end, slot, pages, adapter in segments:
        last = merged[-1] if merged else None
        if end <= start or start < (last.end if last else 0):
            raise ValueError(f"rows {start} to {end} are empty, or overlap the segment before")
        if last and last.end == start and last.slot == slot:
            merged[-1] = last._replace(end=end)
        else:
            merged.append(SlotRows(start, end, slot, pages, adapter.weights))
    return merged


def picked_rows(rows: Sequence[SlotRows], picked: Sequence[int]) -> list[SlotRows]:
    """The same of the batch that is left when only `picked` rows, in rising order, are taken over."""
    spans = [(bisect_left(picked, each.start), bisect_left(picked, each.end), each) for each in rows]
    return [each._replace(start=start, end=end) for start, end, each in spans if start < end]
