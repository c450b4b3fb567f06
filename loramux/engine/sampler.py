"""From logits to tokens, in the order constraint and bias, penalties, temperature, min_p, top_k, top_p.

Log-probabilities are of the raw logits, before any of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from loramux.engine.logit_rules import SampleRow as SampleRow
from loramux.engine.logit_rules import apply_rules
from loramux.engine.noise import uniforms
from loramux.engine.plan import SampledToken
from loramux.engine.types import SamplingParams, TokenLogprob
from loramux.errors import EngineFailed, InvalidRequest
from loramux.kernels.ops import Ops

_NOT_FINITE = EngineFailed("the model's logits are not finite").to_failure()
_NONE_LEFT = InvalidRequest("no token is allowed: the constraint has a dead end, or bad_words forbid all that it allows").to_failure()
_GREEDY_BELOW = 1e-5
_WEIGHT_SCALE = 2.0**50
"""Probabilities become integers below 2^51, whose sums are exact in any order; a probability under 2^-50 is never drawn."""
_NUCLEUS_GUESS = 256
"""Tokens ranked at first for top_p: of 49,152, ranking 256 takes 0.3 ms, the search through all that follows if need be 0.7 ms, and
sorting them 5 ms."""
_DIGIT_BITS = 15
_BLOCK_LOGITS = 1 << 18
"""Drawn from at once: 16 rows of 49,152 take half as long in blocks, whose intermediate results stay in the cache, as in one piece."""


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], bitmask: torch.Tensor | None, ops: Ops) -> list[SampledToken]:
    """One token per row; the order of the rows and who else is among them change nothing.

    logits float32 [R, V], changed in place; bitmask int32 [N, ceil(V / 32)], its rows named by `mask_row`. A row with NaN or +inf
    logits, and one whose rules leave no token, gets `error` instead of a token.
    """
    logits = logits.contiguous()
    logprobs = _RawLogits(logits, rows)
    peaks = logits.amax(dim=1).tolist()
    errors = [None if math.isfinite(peak) else _NOT_FINITE for peak in peaks]
    if any(row.has_rules for row in rows):
        apply_rules(logits, rows, bitmask, ops)
        left = logits.amax(dim=1).tolist()
        errors = [error or (None if math.isfinite(peak) else _NONE_LEFT) for error, peak in zip(errors, left, strict=True)]
    token_ids = _choose(logits, rows, [error is None for error in errors])
    reported = logprobs.of(token_ids)
    return [
        SampledToken(-1, None, error) if error else SampledToken(token, reported.get(index))
        for index, (token, error) in enumerate(zip(token_ids, errors, strict=True))
    ]


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], k: int) -> list[TokenLogprob]:
    """The log-probability of token_ids[i] under logits[i], with the k most likely; logits float32 [T, V]."""
    return _token_logprobs(logits, token_ids, [k] * len(token_ids))


class _RawLogits:
    """A copy of the rows that report log-probabilities, taken before anything changes them."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        asked = [(index, row.sampling.num_logprobs) for index, row in enumerate(rows) if row.sampling.num_logprobs is not None]
        self._indexes = [index for index, _ in asked]
        self._ks = [k for _, k in asked]
        self._logits = _rows_of(logits, self._indexes).clone() if asked else logits[:0]

    def of(self, token_ids: Sequence[int]) -> dict[int, TokenLogprob]:
        """By row, for the tokens chosen."""
        if not self._indexes:
            return {}
        chosen = [token_ids[index] for index in self._indexes]
        return dict(zip(self._indexes, _token_logprobs(self._logits, chosen, self._ks), strict=True))


def _token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], ks: Sequence[int]) -> list[TokenLogprob]:
    if not token_ids:
        return []
    norms = logits.logsumexp(dim=1, keepdim=True)
    raw = logits.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = ((logits > raw).sum(dim=1) + 1).tolist()
    values = (raw - norms).squeeze(1).tolist()
    top = logits.topk(min(max(ks), logits.shape[1]), dim=1)
    top_ids, top_values = top.indices.tolist(), (top.values - norms).tolist()
    return [
        TokenLogprob(token, value, rank, tuple(zip(ids[:k], best[:k], strict=True)))
        for token, value, rank, ids, best, k in zip(token_ids, values, ranks, top_ids, top_values, ks, strict=True)
    ]


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow], usable: Sequence[bool]) -> list[int]:
    """A token for each usable row, 0 for the others."""
    greedy = [index for index, row in enumerate(rows) if usable[index] and row.sampling.temperature < _GREEDY_BELOW]
    drawn = [index for index, row in enumerate(rows) if usable[index] and row.sampling.temperature >= _GREEDY_BELOW]
    token_ids = [0] * len(rows)
    for indexes, choose in ((greedy, _argmax), (drawn, _draw)):
        if indexes:
            chosen = choose(_rows_of(logits, indexes), [rows[index] for index in indexes])
            for index, token in zip(indexes, chosen.tolist(), strict=True):
                token_ids[index] = token
    return token_ids


def _rows_of(logits: torch.Tensor, indexes: Sequence[int]) -> torch.Tensor:
    if len(indexes) == len(logits):
        return logits
    return logits[torch.tensor(indexes, device=logits.device)]


def _argmax(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    return logits.argmax(dim=1)


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    num = max(1, _BLOCK_LOGITS // logits.shape[1])
    starts = range(0, len(rows), num)
    return torch.cat([_draw_block(logits[start : start + num], rows[start : start + num]) for start in starts])


def _draw_block(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Invert the cumulative distribution of what is kept at each row's noise. Every row has a finite peak. -> int64 [S]"""
    temperatures = logits.new_tensor([row.sampling.temperature for row in rows]).unsqueeze(1)
    probs = (logits - logits.amax(dim=1, keepdim=True)).div_(temperatures).softmax(dim=1)
    weights = _weights(probs)
    thresholds = _thresholds(probs, weights, [row.sampling for row in rows])
    if thresholds is not None:
        weights.masked_fill_(probs < thresholds, 0)
    cumulative = weights.cumsum_(dim=1)
    totals = cumulative[:, -1:]
    noise = uniforms(
        [row.sampling.seed for row in rows],
        [row.choice for row in rows],
        [row.num_output_tokens for row in rows],
    )
    targets = (torch.from_numpy(noise).to(logits.device).unsqueeze(1) * totals).long().clamp(max=totals - 1)
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)


def _weights(probs: torch.Tensor) -> torch.Tensor:
    return (probs * _WEIGHT_SCALE).long()


def _thresholds(probs: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor | None:
    """The least probability each row keeps, float32 [S, 1]; tokens equal to it are all kept. None where no row drops any."""
    vocab_size = probs.shape[1]
    ranked = [index for index, each in enumerate(params) if 0 < each.top_k < vocab_size or each.top_p < 1]
    if not ranked and not any(each.min_p > 0 for each in params):
        return None
    thresholds = probs.amax(dim=1, keepdim=True) * probs.new_tensor([each.min_p for each in params]).unsqueeze(1)
    if ranked:
        rows = torch.tensor(ranked, device=probs.device)
        thresholds[rows] = _ranked_thresholds(probs[rows], weights[rows], [params[index] for index in ranked], thresholds[rows])
    return thresholds


def _ranked_thresholds(probs: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams], floors: torch.Tensor) -> torch.Tensor:
    """Thresholds of rows with top_k or top_p, given those of min_p in `floors` [S, 1]."""
    vocab_size = probs.shape[1]
    ks = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
    needed = [k if k < vocab_size else min(_NUCLEUS_GUESS, vocab_size) for k in ks]
    best = probs.topk(max(needed), dim=1).values
    kth = best.gather(1, torch.tensor([num - 1 for num in needed], device=probs.device).unsqueeze(1))
    has_k = torch.tensor([k < vocab_size for k in ks], device=probs.device).unsqueeze(1)
    floors = torch.where(has_k, torch.maximum(floors, kth), floors)
    top_ps = torch.tensor([each.top_p for each in params], dtype=torch.float64, device=probs.device).unsqueeze(1)
    wanted = _wanted_weight(weights, probs, floors, top_ps)
    thresholds, incomplete = _nucleus(best, floors, wanted)
    if bool(incomplete.any()):
        rows = incomplete.nonzero().squeeze(1)
        thresholds[rows] = _least_reaching(probs[rows], weights[rows], wanted[rows].ceil().long().clamp(min=1))
    return torch.where(top_ps < 1, thresholds, floors)


def _wanted_weight(weights: torch.Tensor, probs: torch.Tensor, floors: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """top_p of the weight that min_p and top_k left. -> float64 [S, 1]"""
    return weights.masked_fill(probs < floors, 0).sum(dim=1, keepdim=True).double() * top_ps


def _nucleus(best: torch.Tensor, floors: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The probability of the last token needed to reach the wanted weight, from `best` [S, K], descending. -> [S, 1], and bool [S]:
    True where the K tokens don't reach it and less likely ones are kept."""
    weights = _weights(best).masked_fill_(best < floors, 0)
    reached = weights.cumsum(dim=1)
    last = ((reached - weights).double() < wanted).sum(dim=1, keepdim=True).clamp(min=1) - 1
    short = (reached[:, -1:].double() < wanted) & (best[:, -1:] > floors)
    return torch.maximum(best.gather(1, last), floors), short.squeeze(1)


def _least_reaching(probs: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The largest t such that tokens of probability t or more weigh `wanted` int64 [S, 1] together. -> float32 [S, 1]

    A radix search by two digits: the bits of float32 numbers from 0 to 1 are 30, and in the order of the numbers.
    """
    bits = probs.view(torch.int32)
    highs, lows = bits >> _DIGIT_BITS, bits & ((1 << _DIGIT_BITS) - 1)
    high, heavier = _digit_reaching(highs, weights, wanted)
    low, _ = _digit_reaching(lows, weights.masked_fill(highs != high, 0), wanted - heavier)
    return (high << _DIGIT_BITS | low).int().view(torch.float32)


def _digit_reaching(digits: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest digit at or above which the weights reach `wanted`, and the weight above it. -> int64 [S, 1] each"""
    sums = weights.new_zeros((len(weights), 1 << _DIGIT_BITS)).scatter_add_(1, digits.long(), weights).flip(1)
    downward = sums.cumsum(dim=1)
    place = torch.searchsorted(downward, wanted)
    return (1 << _DIGIT_BITS) - 1 - place, downward.gather(1, place) - sums.gather(1, place)
