"""Sampling noise as a function of (seed, choice, position), so that a token depends on neither the batch nor the steps before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, float64 [R], with 53 random bits.

    Element `position` of the SplitMix64 stream whose state is element `choice` of the stream seeded with mix(seed). SplitMix64 is
    from Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014); its mixer is Stafford's variant 13.
    Seeds are taken modulo 2^64, negative ones too.
    """
    state = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    for counter in (choices, positions):
        state = _mix(state + (np.array(counter, dtype=np.uint64) + np.uint64(1)) * _GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
