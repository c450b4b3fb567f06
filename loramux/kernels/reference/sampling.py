"""A token per row of logits, and log-probabilities.

A token's weight is the nearest whole number to 2^40 e^((logit - peak) / temperature): sums of weights are exact in any order, so that a
draw depends on neither device, threads nor the rows beside it, and a token 2^41 times less likely than the first is never drawn. The power
is float32 arithmetic in the order written here, which every implementation follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from loramux.kernels.ops import LogprobRows, SamplingRow

_WEIGHT_SCALE = 2.0**40
_LOWEST = -29.0
"""Powers of e below this one's weigh nothing."""
_ROUND_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_COEFFICIENTS = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def row_peaks(logits: torch.Tensor) -> torch.Tensor:
    """The largest of each row, NaN where it has one. logits float32 [R, V] -> float32 [R]"""
    return logits.amax(dim=1)


def choose_tokens(logits: torch.Tensor, sampling: Sequence[SamplingRow]) -> list[int]:
    """logits float32 [R, V] -> [R], as `Ops.choose_tokens` says."""
    usable = row_peaks(logits).isfinite()
    token_ids = torch.where(usable, logits.argmax(dim=1), -1)
    is_drawn = torch.tensor([row.temperature > 0 for row in sampling], device=logits.device)
    drawn = (usable & is_drawn).nonzero().squeeze(1)
    if len(drawn):
        token_ids[drawn] = _draw(logits[drawn], _columns([sampling[index] for index in drawn.tolist()], logits.device))
    return token_ids.tolist()


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobRows:
    """logits float32 [R, V], token_ids int64 [R] -> as `Ops.token_logprobs` says."""
    norms = logits.logsumexp(dim=1, keepdim=True)
    raw = logits.gather(1, token_ids.to(logits.device).unsqueeze(1))
    ranks = (logits > raw).sum(dim=1) + 1
    best, ids = logits.sort(dim=1, descending=True, stable=True)
    return LogprobRows((raw - norms).squeeze(1).cpu(), ranks.cpu(), ids[:, :k].cpu(), (best[:, :k] - norms).cpu())


class _Columns(NamedTuple):
    """Of `SamplingRow`s, each [S, 1]."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    noise: torch.Tensor


def _columns(rows: Sequence[SamplingRow], device: torch.device) -> _Columns:
    dtypes = (torch.float32, torch.int64, torch.float64, torch.float32, torch.float64)
    columns = zip(zip(*rows, strict=True), dtypes, strict=True)
    return _Columns(*(torch.tensor(column, dtype=dtype, device=device).unsqueeze(1) for column, dtype in columns))


def _draw(logits: torch.Tensor, sampling: _Columns) -> torch.Tensor:
    """Invert the cumulative distribution of what is kept at each row's noise. Every row has a finite peak. -> int64 [S]"""
    weights = _weights(logits, sampling)
    if bool(((sampling.top_ks > 0) | (sampling.top_ps < 1)).any()):
        _keep_ranked(weights, logits, sampling)
    cumulative = weights.cumsum(dim=1)
    totals = cumulative[:, -1:]
    targets = (sampling.noise * totals.double()).long().clamp(max=totals - 1)
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)


def _weights(logits: torch.Tensor, sampling: _Columns) -> torch.Tensor:
    """0 where the power of e is less than min_p: relative to the most likely token, whose power is 1. -> int64 [S, V]"""
    x = (logits - logits.amax(dim=1, keepdim=True)) * (1 / sampling.temperatures)
    powers = _power(x.clamp(min=_LOWEST))
    return (powers.double() * _WEIGHT_SCALE).round().long().masked_fill_((x < _LOWEST) | (powers < sampling.min_ps), 0)


def _power(x: torch.Tensor) -> torch.Tensor:
    """e^x for _LOWEST <= x <= 0: 2^n e^r with x = n ln 2 + r and a polynomial of degree 6 in r (Cephes' expf: within 2 ulp)."""
    n = (x * _ROUND_LOG2_E).round()
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = torch.full_like(r, 1.9875691500e-4)
    for coefficient in _COEFFICIENTS:
        p = p * r + coefficient
    p = (p * r) * r + r
    return (p + 1) * ((n.int() + 127) << 23).view(torch.float32)


def _keep_ranked(weights: torch.Tensor, logits: torch.Tensor, sampling: _Columns) -> None:
    """Set to 0 what top_k and then top_p drop. A token is kept by its logit, with all its equals."""
    vocab_size = logits.shape[1]
    ranked, order = logits.sort(dim=1, descending=True)
    ks = torch.where((sampling.top_ks > 0) & (sampling.top_ks < vocab_size), sampling.top_ks, vocab_size)
    weights.masked_fill_(logits < ranked.gather(1, ks - 1), 0)
    reached = weights.gather(1, order).cumsum(dim=1)
    totals = reached[:, -1:]
    wanted = (totals.double() * sampling.top_ps).ceil().long().clamp(min=1).minimum(totals)
    last = ranked.gather(1, torch.searchsorted(reached, wanted))
    weights.masked_fill_((logits < last) & (sampling.top_ps < 1), 0)
