"""SplitMix64 in plain integers, first checked against published numbers, is the oracle."""

from __future__ import annotations

import numpy as np

from loramux.engine import noise

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def element(seed: int, index: int) -> int:
    """Number `index` of the SplitMix64 stream."""
    return mix((seed + (index + 1) * GAMMA) & MASK)


def uniform(seed: int, choice: int, position: int) -> float:
    return (element(element(mix(seed & MASK), choice), position) >> 11) / 2**53


def test_oracle_gives_the_published_stream() -> None:
    assert [element(1234567, index) for index in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_rows_equal_the_oracle() -> None:
    rows = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 3, 70_000), (2**64 - 1, 3, 70_000), (2**63, 127, 131_071)]
    drawn = [noise.uniform(*row) for row in rows]
    assert drawn == [uniform(*row) for row in rows]
    assert drawn[4] == drawn[5]


def test_numbers_are_even_and_unrelated() -> None:
    """Neighbours in each argument: the mean, the histogram and the correlation of consecutive numbers are those of even noise."""
    num = 40_000
    count, zeros = list(range(num)), [0] * num
    for arguments in ((count, zeros, zeros), (zeros, count, zeros), (zeros, zeros, count)):
        drawn = np.array([noise.uniform(*each) for each in zip(*arguments, strict=True)])
        assert drawn.min() >= 0 and drawn.max() < 1
        histogram, _ = np.histogram(drawn, bins=100, range=(0, 1))
        chi_square = ((histogram - num / 100) ** 2 / (num / 100)).sum()
        assert chi_square < 170, "99 degrees of freedom: above 170 once in 100,000"
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.025
