"""What slots hold on the device: memory by rank, and never what another adapter left."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from loramux.errors import StartupFailed
from loramux.kernels.ops import AdapterWeights, LoraLimits, LoraShape, SiteShape, SiteWeights, SliceWeights
from loramux.kernels.triton.layout import page_layout
from loramux.kernels.triton.memory import SlotMemory
from loramux.kernels.triton.packing import PagedWeights, pack

IN, OUT = 6, 10
LAYOUT = page_layout(LoraShape((SiteShape(IN, ((0, 4), (4, OUT))), SiteShape(IN, ((0, 3),))), 9, 5, torch.float32))
LIMITS = LoraLimits(num_slots=3, max_rank=16, max_num_tokens=8)


def make_memory(limits: LoraLimits = LIMITS) -> SlotMemory:
    memory = SlotMemory(LAYOUT, limits, torch.device("cpu"))
    memory.pages.fill_(float("nan"))
    return memory


def adapter(value: float, rank: int = 8, shift: float | None = None) -> PagedWeights:
    """Every number of A and B is `value`."""
    shifts = None if shift is None else torch.full((OUT - 4,), shift)
    part = SliceWeights(0, rank, 4, OUT, torch.full((rank, OUT - 4), value), None, shifts)
    return pack(AdapterWeights((SiteWeights(torch.full((rank, IN), value), (part,)), None)), LAYOUT, pinned=False)


def values(memory: SlotMemory, page: int) -> list[float]:
    """Of A of the changed module, in a page."""
    place = LAYOUT.sites[0]
    return place.matrices(memory.pages[page, place.a_start : place.end]).a[1].unique().tolist()


def test_memory_follows_the_rank() -> None:
    eighth = SlotMemory(LAYOUT, LoraLimits(8, 64, 8, memory_bytes=9 * LAYOUT.page_bytes + 1), torch.device("cpu"))
    assert eighth.num_pages == 9
    assert 8 * adapter(1.0, rank=8).num_pages == adapter(1.0, rank=64).num_pages == 8
    assert eighth.pages.nbytes == 9 * LAYOUT.page_bytes


def test_without_a_bound_every_slot_has_room_for_the_largest() -> None:
    assert make_memory().num_pages == 3 * (2 + 1)


def test_memory_for_less_than_one_adapter_is_refused() -> None:
    with pytest.raises(StartupFailed, match=r"an adapter of rank 16 takes up to 0\.000 GiB; raise --lora-memory-gib"):
        make_memory(LIMITS._replace(memory_bytes=3 * LAYOUT.page_bytes - 1))


def test_a_slot_knows_its_pages_ranks_and_vectors() -> None:
    memory = make_memory()
    memory.put(1, (5, 2, 7), adapter(1.5, rank=11, shift=0.5))
    assert memory.table[1].tolist() == [5, 2, 0, 11, 0, 0, -1, 7, -1, -1]
    assert values(memory, 5) == [1.5]
    assert values(memory, 2) == [0, 1.5]
    assert LAYOUT.sites[0].vectors(memory.vectors[7]).tolist() == [[1.0] * OUT, [0.0] * 4 + [0.5] * (OUT - 4)]


def test_another_adapter_takes_a_slot_and_its_pages() -> None:
    memory = make_memory()
    memory.put(0, (0, 1), adapter(1.0, rank=16))
    memory.put(0, (1,), adapter(2.0, rank=3))
    assert memory.table[0].tolist() == [1, 0, 0, 3, 0, 0, -1, -1, -1, -1]
    assert values(memory, 1) == [0, 2.0]


def test_an_adapter_comes_back_to_pages_that_another_slot_used_meanwhile() -> None:
    memory = make_memory()
    first = adapter(1.0, rank=16)
    memory.put(0, (0, 1), first)
    memory.put(2, (1,), adapter(2.0))
    memory.put(0, (0, 1), first)
    assert [values(memory, page) for page in (0, 1)] == [[1.0], [1.0]]


def test_what_a_slot_holds_already_is_not_moved_again() -> None:
    memory = make_memory()
    held = adapter(1.0)
    memory.put(0, (0,), held)
    memory.pages.fill_(3.0)
    memory.put(0, (0,), held)
    assert values(memory, 0) == [3.0]


def test_equal_weights_are_another_adapter() -> None:
    memory = make_memory()
    memory.put(0, (0,), adapter(1.0))
    memory.pages.fill_(3.0)
    memory.put(0, (0,), adapter(1.0))
    assert values(memory, 0) == [1.0]


def test_pages_in_another_order_are_moved_again() -> None:
    memory = make_memory()
    held = adapter(1.0, rank=11)
    memory.put(0, (0, 1), held)
    memory.put(0, (1, 0), held)
    assert values(memory, 1) == [1.0]
    assert values(memory, 0) == [0, 1.0]
    assert memory.table[0, :2].tolist() == [1, 0]


def test_an_adapter_moves_to_another_slot_with_its_pages() -> None:
    memory = make_memory()
    held = adapter(1.0)
    memory.put(0, (4,), held)
    memory.put(2, (4,), held)
    assert memory.table[2, 0] == 4


def test_the_device_keeps_no_host_memory_alive() -> None:
    memory = make_memory()
    weights = adapter(1.0)
    memory.put(0, (0,), weights)
    gone = weakref.ref(weights)
    del weights
    gc.collect()
    assert gone() is None
    memory.put(0, (0,), adapter(2.0))
    assert values(memory, 0) == [2.0]


@pytest.mark.parametrize("pages", [(), (0, 1), (0, 1, 2)])
def test_other_pages_than_the_adapter_takes_are_refused(pages: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"slot 1 has {len(pages)} pages, its adapter takes 1"):
        make_memory().put(1, pages, adapter(1.0))


def test_a_rank_over_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="slot 1 has 3 pages"):
        make_memory().put(1, (0, 1, 2), adapter(1.0, rank=17))
