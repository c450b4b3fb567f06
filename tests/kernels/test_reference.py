"""The reference operations against their equations, written out plainly; low-rank updates are in `test_lora.py`."""

from __future__ import annotations

import random

import pytest
import torch

from loramux.kernels.ops import AttentionBatch
from loramux.kernels.reference.apply_bitmask import apply_bitmask
from loramux.kernels.reference.kv_cache import write_kv
from loramux.kernels.reference.paged_attention import paged_attention, plan_attention
from loramux.kernels.reference.rms_norm import rms_norm
from loramux.kernels.reference.rope import rope
from loramux.kernels.reference.silu_mul import silu_mul


def make_batch(rng: random.Random, num_seqs: int, block_size: int, max_context: int) -> tuple[AttentionBatch, int]:
    """Random chunks at the ends of random contexts over shuffled blocks; returns the number of blocks too."""
    context_lens = [rng.randint(1, max_context) for _ in range(num_seqs)]
    query_lens = [rng.choice([1, 1, rng.randint(1, context)]) for context in context_lens]
    tables = [-(-context // block_size) for context in context_lens]
    blocks = list(range(sum(tables) + 3))
    rng.shuffle(blocks)
    block_tables = torch.zeros(num_seqs, max(tables), dtype=torch.int64)
    slots: list[int] = []
    for s, (context, query) in enumerate(zip(context_lens, query_lens, strict=True)):
        own = [blocks.pop() for _ in range(tables[s])]
        block_tables[s, : len(own)] = torch.tensor(own)
        slots += [own[p // block_size] * block_size + p % block_size for p in range(context - query, context)]
    starts = [0]
    for query in query_lens:
        starts.append(starts[-1] + query)
    batch = AttentionBatch(tuple(starts), tuple(context_lens), block_tables, torch.tensor(slots))
    return batch, sum(tables) + 3


def attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, scale: float, window: int | None
) -> torch.Tensor:
    return paged_attention(q, k_cache, v_cache, plan_attention(batch, k_cache.shape[1], window), scale)


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """One sequence: q [n, Hq, D] are the last n of k, v [L, Hkv, D]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    query_at = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    key_at = torch.arange(k.shape[0])[None]
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 7, 31])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (7, 7, 13), (5, 1, 17)])
def test_paged_attention_equals_full_attention(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> None:
    seed = random.randrange(2**31)
    print(f"seed={seed}")
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for block_size, num_seqs in [(32, 6), (8, 13), (3, 1), (16, 5)]:
        batch, num_blocks = make_batch(rng, num_seqs, block_size, max_context=83)
        k_cache, v_cache = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, generator=generator)
        q = torch.randn(batch.query_starts[-1], num_heads, head_dim, generator=generator)
        got = attend(q, k_cache, v_cache, batch, head_dim**-0.5, window)
        for s, context in enumerate(batch.context_lens):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            k, v = (cache[batch.block_tables[s]].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
            want = full_attention(q[rows], k, v, head_dim**-0.5, window)
            torch.testing.assert_close(got[rows], want, atol=1e-5, rtol=1e-5)


def test_a_decode_row_does_not_depend_on_its_companions() -> None:
    rng = random.Random(3)
    batch, num_blocks = make_batch(rng, 11, 32, max_context=200)
    k_cache, v_cache = torch.randn(2, num_blocks, 32, 3, 64)
    q = torch.randn(batch.query_starts[-1], 9, 64)
    together = attend(q, k_cache, v_cache, batch, 0.125, None)
    for s, context in enumerate(batch.context_lens):
        start, end = batch.query_starts[s : s + 2]
        alone = AttentionBatch((0, end - start), (context,), batch.block_tables[s : s + 1], batch.kv_slots[start:end])
        torch.testing.assert_close(attend(q[start:end], k_cache, v_cache, alone, 0.125, None), together[start:end], atol=1e-5, rtol=0)


def test_write_kv_puts_rows_where_their_slots_say() -> None:
    k, v = torch.randn(2, 5, 3, 7)
    k_cache, v_cache = torch.zeros(2, 4, 11, 3, 7)
    slots = [43, 0, 12, 30, 11]
    write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for row, slot in enumerate(slots):
        assert torch.equal(k_cache[slot // 11, slot % 11], k[row])
        assert torch.equal(v_cache[slot // 11, slot % 11], v[row])
    assert k_cache.count_nonzero() == k.numel()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_one_sequence_left_in_its_blocks_reaches_no_other(poison: float, dtype: torch.dtype) -> None:
    """Every cell is written with poison first, block 0 (the padding) included; then two sequences decode over their own cells."""
    num_blocks, block_size, kv_heads, heads, size = 6, 8, 2, 4, 16
    caches = [torch.zeros(num_blocks, block_size, kv_heads, size, dtype=dtype) for _ in range(2)]
    clean = [cache.clone() for cache in caches]
    everywhere = torch.arange(num_blocks * block_size)
    write_kv(*torch.full((2, len(everywhere), kv_heads, size), poison, dtype=dtype), *caches, everywhere)
    tables, lens = torch.tensor([[1, 2, 3], [4, 0, 0]]), (19, 3)
    own = torch.cat([tables[s].repeat_interleave(block_size)[:n] * block_size + torch.arange(n) % block_size for s, n in enumerate(lens)])
    k, v = torch.randn(2, len(own), kv_heads, size).to(dtype)
    q = torch.randn(2, heads, size).to(dtype)
    batch = AttentionBatch((0, 1, 2), lens, tables, own[[18, 21]])
    got: list[torch.Tensor] = []
    want: list[torch.Tensor] = []
    for target, out in ((caches, got), (clean, want)):
        write_kv(k, v, *target, own)
        out.append(attend(q, *target, batch, size**-0.5, None))
    torch.testing.assert_close(got[0], want[0], atol=0, rtol=0)


def test_rms_norm_and_silu_mul() -> None:
    x, weight = torch.randn(5, 37), torch.randn(37)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), want, atol=1e-5, rtol=1e-5)
    gate_up = torch.randn(3, 2 * 13)
    gate, up = gate_up[:, :13].double(), gate_up[:, 13:].double()
    torch.testing.assert_close(silu_mul(gate_up).double(), gate / (1 + (-gate).exp()) * up, atol=1e-5, rtol=1e-5)


def test_rope_turns_each_pair_by_its_angle() -> None:
    x = torch.randn(4, 3, 10)
    angles = torch.rand(4, 5) * 6
    got = rope(x, torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin())
    pairs = torch.complex(x[..., :5], x[..., 5:]) * torch.polar(torch.ones(4, 5), angles).unsqueeze(1)
    torch.testing.assert_close(got, torch.cat((pairs.real, pairs.imag), -1), atol=1e-5, rtol=1e-5)


def test_bitmask_forbids_exactly_the_clear_bits() -> None:
    vocab_size = 97
    logits = torch.randn(5, vocab_size)
    before = logits.clone()
    allowed = torch.rand(2, 128) < 0.3
    weights = torch.tensor([1 << bit for bit in range(32)], dtype=torch.int64)
    words = (allowed.view(2, 4, 32) * weights).sum(-1)
    bitmask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    apply_bitmask(logits, bitmask, torch.tensor([3, 1]))
    for mask_row, row in ((0, 3), (1, 1)):
        seen = allowed[mask_row, :vocab_size]
        assert torch.equal(logits[row][seen], before[row][seen])
        assert bool((logits[row][~seen] == float("-inf")).all())
    assert torch.equal(logits[[0, 2, 4]], before[[0, 2, 4]])
