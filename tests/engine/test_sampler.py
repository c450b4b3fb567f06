"""The sampler against an oracle written from the definitions, in plain float64 numpy, one row at a time."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from loramux.engine.noise import uniform
from loramux.engine.plan import SampledToken
from loramux.engine.sampler import SampleRow, prompt_logprobs, sample
from loramux.engine.types import SamplingParams, TokenLogprob
from loramux.kernels.reference.ops import ReferenceOps

OPS = ReferenceOps()
VOCAB = 101


def row(
    *,
    choice: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
    mask_row: int | None = None,
    seed: int = 0,
    **sampling: object,
) -> SampleRow:
    return SampleRow(
        SamplingParams(max_tokens=9, seed=seed, **sampling), choice, [*prompt, *output], len(prompt), frozenset(stop_ids), mask_row
    )


def pack(allowed: np.ndarray) -> torch.Tensor:
    """bool [N, V] -> int32 [N, ceil(V / 32)], bit i of word i // 32."""
    padded = np.zeros((allowed.shape[0], -(-allowed.shape[1] // 32) * 32), dtype=bool)
    padded[:, : allowed.shape[1]] = allowed
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def run(logits: np.ndarray, rows: list[SampleRow], allowed: np.ndarray | None = None) -> list[SampledToken]:
    tensor = torch.as_tensor(np.array(logits), dtype=torch.float32)
    return sample(tensor, rows, None if allowed is None else pack(allowed), OPS)


def ruled(logits: np.ndarray, row: SampleRow, allowed: np.ndarray | None) -> np.ndarray:
    """Constraint, bias, bad words, min_tokens and penalties, from their definitions."""
    x = logits.astype(np.float64).copy()
    params, output = row.sampling, list(row.output_token_ids)
    if row.mask_row is not None:
        x[~allowed[row.mask_row]] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for *head, last in params.bad_words:
        if not head or output[-len(head) :] == head:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        without = x.copy()
        without[list(row.stop_ids)] = -np.inf
        if row.mask_row is None or np.isfinite(without).any():
            x = without
    for token in set(row.token_ids):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def kept(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution drawn from, after temperature, min_p, top_k and top_p."""
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max() * (1 - 1e-9)] = 0
    if params.top_k:
        p[p < np.sort(p)[::-1][: params.top_k].min()] = 0
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p * p.sum()]] = 0
    return p / p.sum()


def assert_drawn_from(p: np.ndarray, token: int, u: float) -> None:
    """`token` is where the cumulative distribution passes `u`, to rounding."""
    assert p[token] > 0
    high = p[: token + 1].sum()
    assert high - p[token] - 1e-5 <= u <= high + 1e-5


def random_row(rng: random.Random, mask_row: int | None) -> SampleRow:
    def maybe(value: object, default: object) -> object:
        return value if rng.random() < 0.4 else default

    output = tuple(rng.choices(range(VOCAB), k=rng.randrange(12)))
    return row(
        seed=rng.getrandbits(64),
        choice=rng.randrange(4),
        prompt=tuple(rng.choices(range(VOCAB), k=rng.randrange(30))),
        output=output,
        stop_ids=(7, 8),
        mask_row=mask_row,
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 1.7]),
        top_k=maybe(rng.choice([1, 2, 5, 40, 1000]), 0),
        top_p=maybe(rng.choice([0.01, 0.5, 0.9, 0.999]), 1.0),
        min_p=maybe(rng.choice([0.01, 0.2, 1.0]), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=maybe({token: rng.uniform(-100, 100) for token in rng.sample(range(VOCAB), 5)}, {}),
        bad_words=maybe((*((token,) for token in rng.sample(range(VOCAB), 3)), (*output[-2:], rng.randrange(VOCAB))), ()),
        min_tokens=maybe(rng.choice([1, 5, 20]), 0),
        num_logprobs=maybe(rng.randrange(6), None),
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_equal_the_oracle(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    gen = np.random.default_rng(seed)
    num_rows = rng.randrange(1, 40)
    masked = [rng.random() < 0.4 for _ in range(num_rows)]
    mask_rows = iter(rng.sample(range(sum(masked)), sum(masked)))
    rows = [random_row(rng, next(mask_rows) if is_masked else None) for is_masked in masked]
    allowed = gen.random((sum(masked), VOCAB)) < gen.choice([0.05, 0.5, 0.95], size=(sum(masked), 1))
    allowed[:, 7] = True
    logits = (gen.standard_normal((num_rows, VOCAB)) * gen.choice([0.1, 2, 10])).astype(np.float32)
    drawn = run(logits, rows, allowed if any(masked) else None)
    for each, x, got in zip(rows, logits, drawn, strict=True):
        assert_row(each, x, ruled(x, each, allowed), got)


def assert_row(each: SampleRow, raw: np.ndarray, x: np.ndarray, got: SampledToken) -> None:
    if not np.isfinite(x).any():
        assert got.error is not None and got.error.code == "invalid_request"
        return
    assert got.error is None
    if each.sampling.temperature == 0:
        assert x[got.token_id] >= x.max() - 1e-4
    else:
        u = uniform(each.sampling.seed, each.choice, len(each.output_token_ids))
        assert_drawn_from(kept(x, each.sampling), got.token_id, u)
    if each.sampling.num_logprobs is None:
        assert got.logprob is None
    else:
        assert got.logprob is not None
        assert_logprob(got.logprob, raw, got.token_id, each.sampling.num_logprobs)


def assert_logprob(got: TokenLogprob, raw: np.ndarray, token: int, k: int) -> None:
    raw = raw.astype(np.float64)
    logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    assert got.token_id == token
    assert got.logprob == pytest.approx(logprobs[token], abs=1e-5)
    assert got.rank == (raw > raw[token]).sum() + 1
    best = np.argsort(-logprobs)[:k]
    assert [token for token, _ in got.top] == best.tolist()
    assert [value for _, value in got.top] == pytest.approx(logprobs[best].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("processors", "sampling"),
    [
        ([TemperatureLogitsWarper(0.7)], {"temperature": 0.7}),
        ([TopKLogitsWarper(5)], {"top_k": 5}),
        ([TopPLogitsWarper(0.8)], {"top_p": 0.8}),
        ([MinPLogitsWarper(0.1)], {"min_p": 0.1}),
        ([RepetitionPenaltyLogitsProcessor(1.4)], {"repetition_penalty": 1.4}),
        (
            [
                RepetitionPenaltyLogitsProcessor(0.8),
                TemperatureLogitsWarper(1.3),
                MinPLogitsWarper(0.02),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.9),
            ],
            {"repetition_penalty": 0.8, "temperature": 1.3, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
        ),
    ],
)
def test_distribution_is_that_of_transformers(processors: list[LogitsProcessor], sampling: dict[str, float]) -> None:
    torch.manual_seed(5)
    num_rows = 300
    logits = torch.randn(num_rows, 4000) * 3
    ids = torch.randint(0, 4000, (num_rows, 50))
    expected = LogitsProcessorList(processors)(ids, logits.clone()).double().softmax(dim=1).numpy()
    rows = [row(seed=3, choice=i, prompt=tuple(each[:40]), output=tuple(each[40:]), **sampling) for i, each in enumerate(ids.tolist())]
    noise = [uniform(3, choice, 10) for choice in range(num_rows)]
    for p, got, u in zip(expected, sample(logits, rows, None, OPS), noise, strict=True):
        assert_drawn_from(p, got.token_id, u)


def test_nucleus_wider_than_the_first_guess() -> None:
    """Nearly even logits: top_p keeps thousands of tokens, more than are ranked at first, beside a row that keeps few."""
    num = 120
    logits = np.random.default_rng(6).standard_normal((num, 3000)) * np.tile([0.01, 8.0, 1.0], num // 3)[:, None]
    rows = [row(seed=9, choice=i, top_p=(0.9, 0.99, 0.3)[i % 9 // 3], top_k=(0, 0, 900, 1500)[i % 4]) for i in range(num)]
    noise = [uniform(9, choice, 0) for choice in range(num)]
    for x, each, got, u in zip(logits, rows, run(logits, rows), noise, strict=True):
        assert_drawn_from(kept(x, each.sampling), got.token_id, u)


def test_equal_probabilities_at_the_edge_are_all_kept() -> None:
    logits = np.zeros((500, 8), dtype=np.float32)
    for sampling in ({"top_k": 3}, {"top_p": 0.3}, {"min_p": 1.0}):
        drawn = run(logits, [row(choice=i, **sampling) for i in range(500)])
        assert {got.token_id for got in drawn} == set(range(8))


def test_frequencies_follow_the_distribution() -> None:
    p = np.array([0.5, 0.2, 0.0, 0.15, 0.1, 0.05, 0.0])
    num = 20_000
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(p), (num, 1))
    counts = Counter(got.token_id for got in run(logits, [row(seed=11, choice=i) for i in range(num)]))
    assert counts[2] == counts[6] == 0
    chi_square = sum((counts[token] - num * each) ** 2 / (num * each) for token, each in enumerate(p) if each)
    assert chi_square < 25, "4 degrees of freedom: above 25 once in 20,000"


def test_noise_at_its_ends_gives_a_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.full((2, VOCAB), -np.inf)
    logits[:, [3, 50]] = [1.0, 2.0]
    for u, token in ((0.0, 3), (1 - 2**-53, 50)):
        monkeypatch.setattr("loramux.engine.sampler.uniform", lambda *_, u=u: u)
        assert [got.token_id for got in run(logits, [row(), row(top_p=0.99)])] == [token, token]


def test_a_row_is_answered_alike_in_any_batch() -> None:
    rng, gen = random.Random(21), np.random.default_rng(21)
    logits = (gen.standard_normal((30, VOCAB)) * 2).astype(np.float32)
    rows = [random_row(rng, None) for _ in range(30)]
    together = run(logits, rows)
    order = rng.sample(range(30), 30)
    assert [together[index] for index in order] == run(logits[order], [rows[index] for index in order])
    assert [got.token_id for got in together] == [run(logits[i : i + 1], [rows[i]])[0].token_id for i in range(30)]


def test_noise_differs_by_seed_choice_and_position() -> None:
    logits = np.zeros((200, VOCAB), dtype=np.float32)
    for vary in (
        lambda i: row(seed=i),
        lambda i: row(choice=i),
        lambda i: row(output=(1,) * i),
    ):
        assert len({got.token_id for got in run(logits, [vary(i) for i in range(200)])}) > 60


def test_greedy_is_the_first_of_the_most_likely() -> None:
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[:, [40, 60]] = 3.0
    drawn = run(logits, [row(temperature=0.0, top_k=5, top_p=0.1), row(temperature=1e-6)])
    assert [got.token_id for got in drawn] == [40, 40]


def test_bias_does_not_allow_what_the_grammar_forbids() -> None:
    allowed = np.zeros((1, VOCAB), dtype=bool)
    allowed[0, [2, 3]] = True
    for temperature in (0.0, 1.0):
        rows = [row(mask_row=0, logit_bias={5: 100.0, 3: 50.0}, temperature=temperature)]
        assert run(np.zeros((1, VOCAB)), rows, allowed)[0].token_id == 3


def test_a_row_without_a_choice_fails_alone() -> None:
    logits = np.zeros((6, VOCAB), dtype=np.float32)
    logits[1, 4] = np.nan
    logits[2, 4] = np.inf
    logits[3, :] = -np.inf
    logits[5, 9] = 30.0
    allowed = np.zeros((1, VOCAB), dtype=bool)
    for temperature in (0.0, 1.0):
        params = {"temperature": temperature, "num_logprobs": 1}
        rows = [row(mask_row=0, **params), *(row(**params) for _ in range(5))]
        drawn = run(logits, rows, allowed)
        assert [got.error.code for got in drawn[:4] if got.error] == ["invalid_request", *["engine_failed"] * 3]
        assert all(got.token_id == -1 and got.logprob is None for got in drawn[:4])
        assert drawn[4].error is None
        assert drawn[5].token_id == 9


def test_min_tokens_gives_way_to_a_grammar_that_has_ended() -> None:
    allowed = np.zeros((2, VOCAB), dtype=bool)
    allowed[0, 7] = True
    allowed[1, [7, 20]] = True
    logits = np.zeros((3, VOCAB), dtype=np.float32)
    logits[:, 7] = 9.0
    rows = [row(mask_row=i, stop_ids=(7, 8), min_tokens=4, temperature=0.0) for i in (0, 1, None)]
    assert [got.token_id for got in run(logits, rows, allowed)] == [7, 20, 0]
    assert run(logits[:1], [row(stop_ids=(7,), min_tokens=1, output=(1,), temperature=0.0)])[0].token_id == 7


def test_bad_words_are_not_completed() -> None:
    logits = np.zeros((3, VOCAB), dtype=np.float32)
    logits[:, 7] = 9.0
    words = ((1, 2, 7), (9,))
    rows = [row(output=output, bad_words=words, temperature=0.0) for output in ((0, 1, 2), (1, 0, 2), (2,))]
    assert [got.token_id for got in run(logits, rows)] == [0, 7, 7]


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    params = {"logit_bias": {VOCAB: 100.0, -1: 100.0}, "bad_words": ((VOCAB + 3,),), "min_tokens": 1, "temperature": 0.0}
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[:, 5] = 1.0
    assert [got.token_id for got in run(logits, [row(stop_ids=(VOCAB + 9,), **params)] * 2)] == [5, 5]


def test_prompt_logprobs() -> None:
    gen = np.random.default_rng(4)
    logits = gen.standard_normal((9, VOCAB)).astype(np.float32)
    token_ids = gen.integers(0, VOCAB, 9).tolist()
    for k in (0, 3):
        for got, x, token in zip(prompt_logprobs(torch.from_numpy(logits), token_ids, k, OPS), logits, token_ids, strict=True):
            assert_logprob(got, x, token, k)
    assert prompt_logprobs(torch.zeros(0, VOCAB), [], 2, OPS) == []


class CountedReads(list[int]):
    """A sequence's tokens, counting what is taken out of them."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()


def test_a_row_without_counting_rules_reads_no_more_than_its_bad_words() -> None:
    token_ids = CountedReads([5] * 10_000 + [7, 8])
    sampling = SamplingParams(max_tokens=9, seed=0, temperature=0.0, min_tokens=3, bad_words=((7, 8, 2), (8, 7, 3)))
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [1, 2, 3]] = 1.0, 3.0, 2.0
    rows = [SampleRow(sampling, 0, token_ids, 10_000, frozenset({1}), None)]
    assert [each.token_id for each in run(logits, rows)] == [3]
    assert token_ids.num_read == 4


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [2, 3]] = 2.0, 1.0
    for num_prompt, expected in ((1, 2), (0, 3)):
        rows = [row(prompt=(7, 8)[:num_prompt], output=(7, 8)[num_prompt:], temperature=0.0, bad_words=((7, 8, 2),))]
        assert [each.token_id for each in run(logits, rows)] == [expected]
