"""From logits to tokens, in the order constraint and bias, penalties, temperature, min_p, top_k, top_p.

Log-probabilities are of the raw logits, before any of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from loramux.engine.logit_rules import SampleRow as SampleRow
from loramux.engine.logit_rules import apply_rules
from loramux.engine.noise import uniform
from loramux.engine.plan import SampledToken
from loramux.engine.types import TokenLogprob
from loramux.errors import EngineFailed, InvalidRequest
from loramux.kernels.ops import Ops, SamplingRow

_NOT_FINITE = SampledToken(-1, error=EngineFailed("the model's logits are not finite").to_failure())
_NONE_LEFT = SampledToken(
    -1, error=InvalidRequest("no token is allowed: the constraint has a dead end, or bad_words forbid all that it allows").to_failure()
)
_GREEDY_BELOW = 1e-5


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], bitmask: torch.Tensor | None, ops: Ops) -> list[SampledToken]:
    """One token per row; the order of the rows and who else is among them change nothing.

    logits float32 [R, V], changed in place; bitmask int32 [N, ceil(V / 32)], its rows named by `mask_row`. A row with NaN or +inf
    logits, and one whose rules leave no token, gets `error` instead of a token.
    """
    logits = raw = logits.contiguous()
    peaks = None
    if has_rules := any(row.has_rules for row in rows):
        raw = logits.clone() if any(row.sampling.num_logprobs is not None for row in rows) else logits
        peaks = ops.row_peaks(logits)
        apply_rules(logits, rows, bitmask, ops)
    token_ids = ops.choose_tokens(logits, [_sampling(row) for row in rows])
    are_finite = [True] * len(rows) if peaks is None else list(map(math.isfinite, peaks.tolist()))
    without = _NONE_LEFT if has_rules else _NOT_FINITE
    sampled = [
        (SampledToken(token_id) if token_id >= 0 else without) if is_finite else _NOT_FINITE
        for token_id, is_finite in zip(token_ids, are_finite, strict=True)
    ]
    return _with_logprobs(sampled, raw, rows, ops)


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], k: int, ops: Ops) -> list[TokenLogprob]:
    """The log-probability of token_ids[i] under logits[i], with the k most likely; logits float32 [T, V]."""
    return _token_logprobs(logits, token_ids, [k] * len(token_ids), ops)


_GREEDY = SamplingRow(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, noise=0.0)


def _sampling(row: SampleRow) -> SamplingRow:
    params = row.sampling
    if params.temperature < _GREEDY_BELOW:
        return _GREEDY
    noise = uniform(params.seed, row.choice, row.num_output_tokens)
    return SamplingRow(params.temperature, params.top_k, params.top_p, params.min_p, noise)


def _with_logprobs(sampled: list[SampledToken], raw: torch.Tensor, rows: Sequence[SampleRow], ops: Ops) -> list[SampledToken]:
    """The rows that have a token and report log-probabilities, with them."""
    asked = {
        index: row.sampling.num_logprobs
        for index, row in enumerate(rows)
        if row.sampling.num_logprobs is not None and sampled[index].error is None
    }
    if not asked:
        return sampled
    logits = raw if len(asked) == len(rows) else raw[torch.tensor(list(asked), device=raw.device)]
    found = _token_logprobs(logits, [sampled[index].token_id for index in asked], list(asked.values()), ops)
    by_row = dict(zip(asked, found, strict=True))
    return [each._replace(logprob=by_row.get(index)) for index, each in enumerate(sampled)]


def _token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], ks: Sequence[int], ops: Ops) -> list[TokenLogprob]:
    if not token_ids:
        return []
    found = ops.token_logprobs(logits, torch.tensor(token_ids), max(ks))
    tops = zip(found.top_ids.tolist(), found.top_values.tolist(), ks, strict=True)
    return [
        TokenLogprob(token_id, value, rank, tuple(zip(ids[:k], values[:k], strict=True)))
        for token_id, value, rank, (ids, values, k) in zip(token_ids, found.values.tolist(), found.ranks.tolist(), tops, strict=True)
    ]
