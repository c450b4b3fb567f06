"""What changes logits before a token is chosen: constraint, bias, bad words, min_tokens, penalties. In place, only on rows that ask.

A token the constraint forbids is at -inf, and every later rule leaves -inf as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from loramux.engine.types import SamplingParams
from loramux.kernels.ops import Ops

_FORBIDDEN = float("-inf")


class SampleRow(NamedTuple):
    """Whose logits a row holds. Filled by the runner."""

    sampling: SamplingParams
    choice: int
    token_ids: Sequence[int]
    """Prompt and output so far: the sequence's own list, not a copy, for no longer than the step."""
    num_prompt_tokens: int
    stop_ids: frozenset[int]
    """Tokens that end the sequence, end-of-sequence included; not chosen before `min_tokens`."""
    mask_row: int | None
    """Row of the bitmask, where the sequence is constrained."""

    @property
    def num_output_tokens(self) -> int:
        """The position of the token to come."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> Sequence[int]:
        """A copy, for the rules that count tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def output_ends_with(self, tail: tuple[int, ...]) -> bool:
        start = len(self.token_ids) - len(tail)
        return start >= self.num_prompt_tokens and tuple(self.token_ids[start:]) == tail

    @property
    def below_min_tokens(self) -> bool:
        return self.sampling.min_tokens > 0 and self.num_output_tokens < self.sampling.min_tokens

    @property
    def is_penalised(self) -> bool:
        return self.sampling.repetition_penalty != 1.0 or self.is_counted

    @property
    def is_counted(self) -> bool:
        return self.sampling.presence_penalty != 0.0 or self.sampling.frequency_penalty != 0.0

    @property
    def has_rules(self) -> bool:
        sampling = self.sampling
        return (
            self.mask_row is not None or self.below_min_tokens or self.is_penalised or bool(sampling.logit_bias) or bool(sampling.bad_words)
        )


class _Cells(NamedTuple):
    """Places in the logits and a number for each."""

    places: torch.Tensor
    """int64 [K] into the flattened logits."""
    value: torch.Tensor
    """float32 [K]"""


def _cells(parts: Iterable[tuple[int, ArrayLike, ArrayLike]], logits: torch.Tensor) -> _Cells:
    """From (row, token ids, one value or one per id); ids that are no token of the vocabulary are left out."""
    places, spreads = [], []
    for row, token_ids, value in parts:
        ids, spread = np.broadcast_arrays(np.asarray(token_ids, dtype=np.int64), np.asarray(value, dtype=np.float32))
        inside = (ids >= 0) & (ids < logits.shape[1])
        places.append(ids[inside] + row * logits.shape[1])
        spreads.append(spread[inside])
    return _Cells(torch.from_numpy(np.concatenate(places)).to(logits.device), torch.from_numpy(np.concatenate(spreads)).to(logits.device))


def apply_rules(logits: torch.Tensor, rows: Sequence[SampleRow], bitmask: torch.Tensor | None, ops: Ops) -> None:
    """Change logits float32 [R, V] (contiguous) in place; bitmask int32 [N, ceil(V / 32)], as `Ops.apply_bitmask` takes it."""
    _apply_constraints(logits, rows, bitmask, ops)
    _apply_bias(logits, rows)
    _forbid_bad_words(logits, rows)
    _forbid_stops(logits, rows)
    _apply_repetition_penalty(logits, rows)
    _apply_count_penalties(logits, rows)


def _apply_constraints(logits: torch.Tensor, rows: Sequence[SampleRow], bitmask: torch.Tensor | None, ops: Ops) -> None:
    pairs = [(row.mask_row, index) for index, row in enumerate(rows) if row.mask_row is not None]
    if not pairs:
        return
    assert bitmask is not None, "a constrained row needs a bitmask"
    mask_rows, indexes = zip(*pairs, strict=True)
    if mask_rows != tuple(range(len(bitmask))):
        bitmask = bitmask[torch.tensor(mask_rows)]
    ops.apply_bitmask(logits, bitmask, torch.tensor(indexes))


def _apply_bias(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    biases = [(index, row.sampling.logit_bias) for index, row in enumerate(rows) if row.sampling.logit_bias]
    if biases:
        cells = _cells(((index, list(bias), list(bias.values())) for index, bias in biases), logits)
        logits.view(-1)[cells.places] += cells.value


def _forbid_bad_words(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """A bad word's last token is forbidden where the output ends with the rest of it."""
    endings = [
        (index, word[-1:], _FORBIDDEN)
        for index, row in enumerate(rows)
        for word in row.sampling.bad_words
        if row.output_ends_with(word[:-1])
    ]
    if endings:
        cells = _cells(endings, logits)
        logits.view(-1)[cells.places] = cells.value


def _forbid_stops(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Forbid stop ids below min_tokens; a constrained row keeps them where nothing else is left, because its grammar has ended."""
    early = [(index, list(row.stop_ids), _FORBIDDEN) for index, row in enumerate(rows) if row.below_min_tokens and row.stop_ids]
    if not early:
        return
    cells = _cells(early, logits)
    flat = logits.view(-1)
    before = flat[cells.places]
    flat[cells.places] = cells.value
    constrained = torch.tensor([row.mask_row is not None for row in rows], device=logits.device)
    ended = constrained & (logits.amax(dim=1) == _FORBIDDEN)
    flat[cells.places] = torch.where(ended[cells.places // logits.shape[1]], before, cells.value)


def _apply_repetition_penalty(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """logit / p where positive, logit * p where negative, for every token of prompt and output (arXiv:1909.05858)."""
    penalised = [(index, row) for index, row in enumerate(rows) if row.sampling.repetition_penalty != 1.0]
    if not penalised:
        return
    seen = ((index, row.token_ids, row.sampling.repetition_penalty) for index, row in penalised)
    cells = _cells(seen, logits)
    flat = logits.view(-1)
    before = flat[cells.places]
    flat[cells.places] = torch.where(before > 0, before / cells.value, before * cells.value)


def _apply_count_penalties(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """logit - frequency_penalty * count - presence_penalty, for every token of the output."""
    counted = [(index, row) for index, row in enumerate(rows) if row.is_counted and row.num_output_tokens]
    if counted:
        cells = _cells(((index, *_count_losses(row)) for index, row in counted), logits)
        logits.view(-1)[cells.places] -= cells.value


def _count_losses(row: SampleRow) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    token_ids, counts = np.unique(np.asarray(row.output_token_ids, dtype=np.int64), return_counts=True)
    return token_ids, (row.sampling.frequency_penalty * counts + row.sampling.presence_penalty).astype(np.float64)
