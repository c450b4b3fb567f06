from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import NamedTuple

import pytest

from loramux.errors import AdapterInvalid, AdapterLoading, Conflict, EngineFailed
from loramux.lora.host_cache import HostCache


class Item(NamedTuple):
    digest: str
    num_bytes: int


class Loader:
    """Loads `name/bytes` as an item of that many bytes, once the gate is open; counts, and fails where told."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()
        self.failing: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, digest: str) -> Item:
        assert self.gate.wait(10)
        self.loads[digest] += 1
        if digest in self.failing:
            raise AdapterInvalid(f"{digest} is bad")
        return Item(digest, int(digest.partition("/")[2]))


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def cache(loader: Loader) -> Iterator[HostCache[Item]]:
    cache: HostCache[Item] = HostCache(100, loader)
    yield cache
    loader.gate.set()
    cache.close()
    cache.check_integrity()


def test_loaded_once_for_all_who_wait(cache: HostCache[Item], loader: Loader) -> None:
    loader.gate.clear()
    futures = [cache.acquire("a/10") for _ in range(20)]
    assert not any(future.done() for future in futures)
    cache.check_integrity()
    loader.gate.set()
    assert {future.result(10) for future in futures} == {Item("a/10", 10)}
    assert loader.loads == {"a/10": 1}
    assert cache.acquire("a/10").done()
    for _ in range(21):
        cache.release("a/10")
    with pytest.raises(KeyError):
        cache.release("a/10")
    assert (cache.num_adapters, cache.num_bytes) == (1, 10)


def test_acquire_does_not_wait_for_the_load(cache: HostCache[Item], loader: Loader) -> None:
    loader.gate.clear()
    start = time.monotonic()
    cache.acquire("a/10")
    assert time.monotonic() - start < 1
    loader.gate.set()


def test_the_least_recently_used_is_evicted(cache: HostCache[Item], loader: Loader) -> None:
    for digest in ("a/40", "b/40", "a/40", "c/40"):
        cache.acquire(digest).result(10)
        cache.release(digest)
    assert (cache.num_adapters, cache.num_bytes) == (2, 80)
    for digest in ("a/40", "c/40"):
        assert cache.acquire(digest).done()
        cache.release(digest)
    cache.acquire("b/40").result(10)
    assert loader.loads == {"a/40": 1, "b/40": 2, "c/40": 1}
    cache.release("b/40")


def test_a_failed_load_leaves_nothing_and_is_tried_again(cache: HostCache[Item], loader: Loader) -> None:
    loader.failing.add("a/10")
    loader.gate.clear()
    futures = [cache.acquire("a/10") for _ in range(3)]
    loader.gate.set()
    for future in futures:
        with pytest.raises(AdapterInvalid, match="is bad"):
            future.result(10)
    cache.check_integrity()
    assert (cache.num_adapters, cache.num_bytes) == (0, 0)
    with pytest.raises(KeyError):
        cache.release("a/10")
    loader.failing.clear()
    assert cache.acquire("a/10").result(10) == Item("a/10", 10)
    cache.release("a/10")


def test_larger_than_the_cache(cache: HostCache[Item]) -> None:
    cache.acquire("a/60").result(10)
    with pytest.raises(AdapterInvalid, match="101 bytes, the host cache holds 100"):
        cache.acquire("b/101").result(10)
    cache.check_integrity()
    assert cache.acquire("c/40").result(10).num_bytes == 40
    cache.release("a/60")
    cache.release("c/40")


def test_a_load_without_room_waits_for_a_release(cache: HostCache[Item], loader: Loader) -> None:
    cache.acquire("a/60").result(10)
    waiting, later = cache.acquire("b/50"), cache.acquire("c/50")
    done, _ = wait([waiting, later], timeout=0.2)
    assert not done
    cache.check_integrity()
    assert cache.num_bytes == 60
    cache.release("a/60")
    assert waiting.result(10) == Item("b/50", 50)
    assert later.result(10) == Item("c/50", 50)
    assert cache.num_bytes == 100
    cache.release("b/50")
    cache.release("c/50")


def test_a_large_adapter_is_not_starved_by_small_ones(cache: HostCache[Item]) -> None:
    cache.acquire("a/60").result(10)
    large = cache.acquire("large/90")
    wait([large], timeout=0.2)
    small = cache.acquire("small/10")
    wait([small], timeout=0.2)
    assert not small.done()
    cache.release("a/60")
    assert large.result(10) and small.result(10)
    cache.release("large/90")
    cache.release("small/10")


def test_futures_cannot_be_cancelled(cache: HostCache[Item], loader: Loader) -> None:
    loader.gate.clear()
    future = cache.acquire("a/10")
    assert not future.cancel()
    loader.gate.set()
    future.result(10)
    cache.release("a/10")


def test_callbacks_may_use_the_cache(cache: HostCache[Item]) -> None:
    released = threading.Event()

    def release(future: Future[Item]) -> None:
        cache.release(future.result().digest)
        released.set()

    cache.acquire("a/10").add_done_callback(release)
    assert released.wait(10)


def test_closing_fails_what_waits(loader: Loader) -> None:
    cache: HostCache[Item] = HostCache(100, loader)
    cache.acquire("a/90").result(10)
    waiting = cache.acquire("b/90")
    wait([waiting], timeout=0.2)
    cache.close()
    for future in (waiting, cache.acquire("c/10")):
        with pytest.raises(EngineFailed, match="stopping"):
            future.result(10)
    cache.check_integrity()


def _pin_or_unpin(rng: random.Random, cache: HostCache[Item], digest: str) -> None:
    if rng.random() < 0.1:
        cache.keep(digest)
        with contextlib.suppress(Conflict):
            cache.pin(digest)
    elif rng.random() < 0.2:
        cache.unpin(digest)


def load(cache: HostCache[Item], digest: str) -> None:
    cache.acquire(digest).result(10)


def unload(cache: HostCache[Item], *digests: str) -> None:
    for digest in digests:
        cache.release(digest)


def test_what_is_dropped_goes_with_its_last_user(cache: HostCache[Item], loader: Loader) -> None:
    for _ in range(2):
        load(cache, "a/10")
    cache.drop("a/10")
    cache.drop("unknown/1")
    unload(cache, "a/10")
    assert cache.num_bytes == 10
    state = cache.state("a/10")
    assert state is not None and state.dropped and state.value == Item("a/10", 10)
    unload(cache, "a/10")
    assert (cache.num_adapters, cache.num_bytes, cache.state("a/10")) == (0, 0, None)
    load(cache, "a/10")
    unload(cache, "a/10")
    assert (cache.num_bytes, loader.loads["a/10"]) == (10, 2)
    cache.drop("a/10")
    assert (cache.num_bytes, cache.num_evictions, cache.num_loads) == (0, 2, 2)


def test_dropped_while_it_loads(cache: HostCache[Item], loader: Loader) -> None:
    loader.gate.clear()
    futures = [cache.acquire("a/10") for _ in range(2)]
    cache.drop("a/10")
    loader.gate.set()
    assert [future.result(10) for future in futures] == [Item("a/10", 10)] * 2
    unload(cache, "a/10", "a/10")
    assert cache.state("a/10") is None


def test_a_dropped_adapter_can_be_kept_after_all(cache: HostCache[Item]) -> None:
    load(cache, "a/10")
    cache.drop("a/10")
    cache.keep("a/10")
    unload(cache, "a/10")
    assert cache.num_bytes == 10


def test_a_pinned_adapter_is_not_evicted_until_it_is_unpinned(cache: HostCache[Item], loader: Loader) -> None:
    load(cache, "a/40")
    cache.pin("a/40")
    cache.pin("a/40")
    unload(cache, "a/40")
    with pytest.raises(KeyError):
        cache.release("a/40")
    for digest in ("b/50", "c/50"):
        load(cache, digest)
        unload(cache, digest)
    assert loader.loads["a/40"] == 1 and cache.num_bytes == 90
    cache.unpin("a/40")
    cache.unpin("a/40")
    load(cache, "b/50")
    load(cache, "d/20")
    assert cache.state("a/40") is None
    unload(cache, "b/50", "d/20")


def test_dropping_takes_the_pin_away(cache: HostCache[Item]) -> None:
    load(cache, "a/40")
    cache.pin("a/40")
    unload(cache, "a/40")
    cache.drop("a/40")
    assert cache.state("a/40") is None and cache.num_bytes == 0


def test_pins_leave_room_for_the_largest_seen(cache: HostCache[Item]) -> None:
    load(cache, "large/60")
    with pytest.raises(Conflict, match="60 bytes leave no room"):
        cache.pin("large/60")
    load(cache, "a/30")
    cache.pin("a/30")
    unload(cache, "a/30", "large/60")
    load(cache, "b/20")
    with pytest.raises(Conflict, match="50 bytes leave no room in a host cache of 100"):
        cache.pin("b/20")
    unload(cache, "b/20")
    with pytest.raises(AdapterLoading, match="71 bytes, pinned adapters hold 30 of 100"):
        cache.acquire("larger/71").result(10)
    load(cache, "fits/70")
    unload(cache, "fits/70")
    cache.unpin("a/30")
    load(cache, "larger/71")
    unload(cache, "larger/71")


def test_what_changed_is_told_once(cache: HostCache[Item], loader: Loader) -> None:
    loader.gate.clear()
    future = cache.acquire("a/60")
    assert cache.take_changed() == {"a/60"} and cache.num_loading == 1
    state = cache.state("a/60")
    assert state is not None and state.value is None
    loader.gate.set()
    future.result(10)
    assert cache.take_changed() == {"a/60"} and cache.num_loading == 0
    unload(cache, "a/60")
    assert cache.take_changed() == set()
    load(cache, "b/60")
    assert cache.take_changed() == {"a/60", "b/60"}
    loader.failing.add("c/10")
    with pytest.raises(AdapterInvalid):
        load(cache, "c/10")
    assert cache.take_changed() == {"c/10"} and cache.state("c/10") is None
    unload(cache, "b/60")


@pytest.mark.parametrize("seed", range(5))
def test_random_use_from_many_threads(seed: int) -> None:
    """Sizes to 100 of 100 bytes, some failing, pins and drops in between: nobody hangs, the bound holds, and at the end nothing is used."""
    print("seed", seed)
    loader = Loader()
    loader.failing = {"f/10", "g/30"}
    cache: HostCache[Item] = HostCache(100, loader, num_threads=3)
    digests = ["a/10", "b/20", "c/30", "d/40", "e/60", "f/10", "g/30", "h/100"]
    problems: list[BaseException] = []

    def use(rng: random.Random) -> None:
        try:
            for _ in range(60):
                digest = rng.choice(digests)
                future = cache.acquire(digest)
                if rng.random() < 0.1:
                    cache.drop(digest)
                if future.exception(20) is None:
                    assert future.result().digest == digest
                    _pin_or_unpin(rng, cache, digest)
                    time.sleep(rng.random() * 2e-4)
                    cache.release(digest)
                cache.check_integrity()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=use, args=(random.Random(seed * 100 + i),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems and not any(thread.is_alive() for thread in threads)
    for digest in digests:
        cache.unpin(digest)
        with pytest.raises(KeyError):
            cache.release(digest)
        cache.drop(digest)
    assert (cache.num_adapters, cache.num_bytes, cache.num_loading) == (0, 0, 0)
    assert cache.num_loads == cache.num_evictions > 0
    cache.close()
    cache.check_integrity()
