"""What each linear layer must add in a step, from the step's segments. Built anew every step, so nothing leaks from one to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from loramux.kernels.ops import LoraTerm
from loramux.lora.types import LoraSegment


def lora_terms(segments: Sequence[LoraSegment]) -> dict[str, tuple[LoraTerm, ...]]:
    """Terms by site name; a site that no adapter of the step changes is absent. Neighbouring segments of one adapter become one term.

    Segments are in order of row and disjoint; rows of no segment are the base's. Raises ValueError otherwise.
    """
    terms: defaultdict[str, list[LoraTerm]] = defaultdict(list)
    for start, end, adapter in _merged(segments):
        for site, weights in adapter.sites.items():
            terms[site].append(LoraTerm(start, end, weights.a, weights.slices))
    return {site: tuple(of_site) for site, of_site in terms.items()}


def _merged(segments: Iterable[LoraSegment]) -> list[LoraSegment]:
    merged: list[LoraSegment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if segment.end <= segment.start or segment.start < (last.end if last else 0):
            raise ValueError(f"rows {segment.start} to {segment.end} are empty, or overlap the segment before")
        if last and last.end == segment.start and last.adapter.digest == segment.adapter.digest:
            merged[-1] = LoraSegment(last.start, segment.end, segment.adapter)
        else:
            merged.append(segment)
    return merged
