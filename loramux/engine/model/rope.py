"""Inverse frequencies of rotary embeddings, by rope type.

`linear`: position interpolation (arXiv 2306.15595). `llama3`: as released with Llama 3.1. `yarn`: arXiv 2309.00071.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from loramux.engine.model.config import RopeConfig
from loramux.errors import StartupFailed


class RopeFrequencies(NamedTuple):
    inverse: torch.Tensor
    """float32 [D / 2] radians per position"""
    attention_factor: float
    """cos and sin are multiplied by this."""


def rope_frequencies(rope: RopeConfig, head_dim: int) -> RopeFrequencies:
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.rope_type:
        case "default":
            return RopeFrequencies(base, 1.0)
        case "linear":
            return RopeFrequencies(base / _given(rope.factor), 1.0)
        case "llama3":
            return RopeFrequencies(_llama3(base, rope), 1.0)
        case "yarn":
            return RopeFrequencies(_yarn(base, rope, head_dim), _yarn_attention_factor(rope))
        case other:
            raise StartupFailed(f"rope type {other!r} is not supported")


def rope_table(frequencies: RopeFrequencies, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [T, D], for positions int64 [T]."""
    angles = positions.float().unsqueeze(1) * frequencies.inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * frequencies.attention_factor, angles.sin() * frequencies.attention_factor


def _given(value: float | None) -> float:
    """config.py has checked that the numbers a type needs are there."""
    if value is None:
        raise StartupFailed("a number that this rope type needs is missing")
    return value


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    factor, low, high = _given(rope.factor), _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    turns = _given(rope.original_max_position_embeddings) * base / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * base / factor + smooth * base


def _yarn(base: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    low, high = (_yarn_dimension(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / _given(rope.factor) * ramp + base * (1 - ramp)


def _yarn_dimension(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The dimension that turns `turns` times over the original context."""
    length = _given(rope.original_max_position_embeddings)
    return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _given(rope.factor)
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(factor, rope.mscale) / _yarn_mscale(factor, rope.mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
