from __future__ import annotations

import itertools

import pytest
import torch

from loramux.kernels.ops import LoraShape, SiteShape
from loramux.kernels.triton.layout import page_layout

LLAMA_8B = LoraShape(
    (
        *(
            SiteShape(4096, ((0, 4096), (4096, 5120), (5120, 6144))),
            SiteShape(4096, ((0, 4096),)),
            SiteShape(4096, ((0, 14336), (14336, 28672))),
            SiteShape(14336, ((0, 4096),)),
        )
        * 32,
        SiteShape(4096, ((0, 128256),)),
    ),
    128256,
    4096,
    torch.bfloat16,
)
ODD = LoraShape((SiteShape(37, ((0, 5), (5, 6))), SiteShape(1, ((0, 131),))), 11, 3, torch.float32)


@pytest.mark.parametrize("shape", [LLAMA_8B, ODD])
def test_matrices_of_a_page_lie_apart_and_aligned(shape: LoraShape) -> None:
    layout = page_layout(shape)
    page = torch.zeros(layout.page_elements, dtype=torch.uint8)
    for site in layout.sites:
        a, b = site.matrices(page[site.a_start : site.end])
        assert a.shape == (len(site.slices), 8, site.in_features)
        assert b.shape == (8, site.width)
        a += 1
        b += 1
    assert page.max() == 1
    starts = [start for site in layout.sites for start in (site.a_start, site.b_start)]
    assert all(start % 64 == 0 for start in (*starts, layout.page_elements))
    assert page.sum() == 8 * num_parameters_of_a_rank(shape)


def num_parameters_of_a_rank(shape: LoraShape) -> int:
    linear = sum(site.in_features + end - start for site in shape.sites for start, end in site.slices)
    return linear + shape.vocab_size + shape.hidden_size


@pytest.mark.parametrize("shape", [LLAMA_8B, ODD])
def test_vectors_of_a_page_lie_apart_and_fit(shape: LoraShape) -> None:
    layout = page_layout(shape)
    page = torch.zeros(layout.num_vector_elements, dtype=torch.uint8)
    for site in layout.sites:
        vectors = site.vectors(page)
        assert vectors.shape == (2, site.width)
        vectors += 1
    assert page.max() == 1
    assert layout.num_vector_elements * 4 <= layout.page_bytes


def test_every_module_has_a_number() -> None:
    layout = page_layout(ODD)
    assert [site.module_start for site in layout.sites] == [0, 2, 3]
    assert layout.num_modules == 4


def test_the_embedding_keeps_the_ranks_of_a_token_together() -> None:
    site = page_layout(ODD).embedding
    part = torch.arange(site.num_elements)
    assert site.matrices(part).a[0, :, 4].tolist() == list(range(32, 40))


def test_a_page_wastes_next_to_nothing() -> None:
    assert page_layout(LLAMA_8B).page_elements / (8 * num_parameters_of_a_rank(LLAMA_8B)) == pytest.approx(1, abs=1e-3)


def test_neighbouring_sites_adjoin() -> None:
    assert all(before.end == after.a_start for before, after in itertools.pairwise(page_layout(ODD).sites))
