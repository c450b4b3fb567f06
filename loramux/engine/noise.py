"""Sampling noise as a function of (seed, choice, position), so that a token depends on neither the batch nor the steps before it."""

from __future__ import annotations

from functools import lru_cache

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits.

    Element `position` of the SplitMix64 stream whose state is element `choice` of the stream seeded with mix(seed). SplitMix64 is
    from Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014); its mixer is Stafford's variant 13.
    Seeds are taken modulo 2^64, negative ones too.
    """
    return (_element(_stream(seed, choice), position) >> 11) * 2.0**-53


@lru_cache(maxsize=1024)
def _stream(seed: int, choice: int) -> int:
    return _element(_mix(seed & _MASK), choice)


def _element(state: int, index: int) -> int:
    return _mix((state + (index + 1) * _GAMMA) & _MASK)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
