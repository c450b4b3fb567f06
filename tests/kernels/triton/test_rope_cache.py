"""Norms of heads, rope and the KV cache's write in one launch, against the three reference operations one after another."""

from __future__ import annotations

import pytest
import torch

from loramux.kernels.reference.kv_cache import write_kv
from loramux.kernels.reference.rms_norm import rms_norm
from loramux.kernels.reference.rope import rope
from loramux.kernels.triton.rope_cache import KvCache, rope_cache
from tests.kernels.triton.batches import by_head

NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS = 4, 8, 5
SLOTS = [31, 0, 7, 8, 18]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 5e-2}


class Case:
    """Random heads, norms and angles."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(head_dim)
        self.num_heads, self.num_kv_heads, self.head_dim, self.dtype = num_heads, num_kv_heads, head_dim, dtype
        self.qkv = self.randn(NUM_ROWS, (num_heads + 2 * num_kv_heads) * head_dim)
        self.norms = (self.randn(head_dim), self.randn(head_dim))
        angles = (torch.rand(NUM_ROWS, head_dim // 2, generator=self._generator) * 100).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.caches = [self.randn(NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim) for _ in range(2)]

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator).to(self.dtype)

    def run(self, *, has_norms: bool) -> tuple[torch.Tensor, KvCache]:
        """The row with its queries turned, and the cache."""
        cache, qkv = by_head(*self.caches), self.qkv.clone()
        rope_cache(qkv, self.norms if has_norms else None, self.cos, self.sin, cache, torch.tensor(SLOTS, dtype=torch.int32), 1e-5)
        return qkv, cache

    def expected(self, *, has_norms: bool) -> tuple[torch.Tensor, KvCache]:
        heads = self.qkv.view(NUM_ROWS, -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if has_norms:
            q, k = (rms_norm(x, norm, 1e-5) for x, norm in zip((q, k), self.norms, strict=True))
        q, k = rope(q, self.cos, self.sin), rope(k, self.cos, self.sin)
        caches = [cache.clone() for cache in self.caches]
        write_kv(k, v, caches[0], caches[1], torch.tensor(SLOTS))
        return torch.cat((q.flatten(1), self.qkv[:, q[0].numel() :]), 1), by_head(*caches)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("sizes", [(4, 2, 64), (3, 3, 10), (7, 1, 96), (2, 1, 80)], ids=str)
def test_it_equals_the_reference(sizes: tuple[int, int, int], has_norms: bool, dtype: torch.dtype) -> None:
    case = Case(*sizes, dtype)
    (qkv, cache), (want_qkv, want_cache) = case.run(has_norms=has_norms), case.expected(has_norms=has_norms)
    for got, want in ((qkv, want_qkv), (cache.k, want_cache.k), (cache.v, want_cache.v)):
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_finite_is_stored_as_the_reference_stores_it(poison: float, dtype: torch.dtype) -> None:
    case = Case(4, 2, 16, dtype)
    case.qkv[[1, 3]] = poison
    case.sin.zero_()
    case.cos.fill_(1)
    cache, want = case.run(has_norms=False)[1], case.expected(has_norms=False)[1]
    assert cache.k.isfinite().all() and cache.v.isfinite().all()
    torch.testing.assert_close(cache.v, want.v, rtol=8e-3, atol=0)


def test_no_rows_are_no_launch() -> None:
    case = Case(4, 2, 16, torch.float32)
    rope_cache(case.qkv[:0], None, case.cos[:0], case.sin[:0], by_head(*case.caches), torch.zeros(0, dtype=torch.int32), 1e-5)
