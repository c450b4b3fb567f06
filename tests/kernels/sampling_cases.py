"""Random rows of logits, and ways to draw from them."""

from __future__ import annotations

import random

import torch

from loramux.kernels.ops import SamplingRow


def random_rows(seed: int, num_rows: int) -> list[SamplingRow]:
    rng = random.Random(seed)
    return [
        SamplingRow(
            temperature=rng.choice([0.0, 1e-4, 0.3, 0.8, 1.0, 1.7, 30.0]),
            top_k=rng.choice([0, 0, 1, 2, 50, 1000, 10**6]),
            top_p=rng.choice([1.0, 1.0, 0.0, 0.01, 0.5, 0.95, 0.999999]),
            min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1.0]),
            noise=rng.random(),
        )
        for _ in range(num_rows)
    ]


def random_logits(generator: torch.Generator, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Rows that are even, peaked, full of equals, mostly forbidden, or none of these."""
    logits = torch.randn(num_rows, vocab_size, generator=generator) * torch.rand(num_rows, 1, generator=generator).mul(6).sub(3).exp()
    logits[0::5] = (logits[0::5] * 2).round() / 2
    logits[1::5] = logits[1::5].masked_fill(torch.rand(logits[1::5].shape, generator=generator) < 0.98, float("-inf"))
    logits[1::5, 0] = -0.0
    return logits
