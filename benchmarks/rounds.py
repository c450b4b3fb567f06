"""Figures taken in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence


def in_turn(cases: Mapping[str, Callable[[], list[float]]], num_rounds: int) -> dict[str, list[float]]:
    """All the seconds of each case; a round of each before the next round of any, so that a slow minute is everyone's."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(num_rounds):
        for name, work in cases.items():
            seconds[name] += work()
    return seconds


def median_ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)
