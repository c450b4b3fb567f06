from __future__ import annotations

import random

import pytest

from loramux.engine.block_pool import BlockPool


def test_freed_blocks_keep_their_key_until_reused_tail_first() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    for block, key in zip(table, (b"1", b"2", b"3"), strict=True):
        pool.publish(block, key)
    pool.release(table)
    assert pool.match([b"1", b"2", b"3"]) == table
    pool.allocate(2)  # the empty one, then the tail
    assert pool.match([b"1", b"2", b"3"]) == table[:2]
    assert pool.num_cached == 2


def test_a_match_stops_at_the_first_unknown_key() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    pool.publish(table[0], b"1")
    pool.publish(table[2], b"3")
    assert pool.match([b"1", b"2", b"3"]) == table[:1]


def test_shared_blocks_are_free_only_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.publish(table[0], b"1")
    pool.hold(table[:1])
    pool.release(table)
    assert pool.num_free == 1
    pool.release(table[:1])
    assert pool.num_free == 2


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"1")
    pool.publish(second, b"1")
    assert pool.match([b"1"]) == [first]
    pool.release([second])
    pool.check_integrity([[first]])


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_counts(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    pool = BlockPool(rng.randrange(1, 20))
    tables: list[list[int]] = []
    for _ in range(500):
        action = rng.random()
        if action < 0.5 and pool.num_free:
            table = pool.allocate(rng.randrange(1, pool.num_free + 1))
            for block in table:
                if rng.random() < 0.7:
                    pool.publish(block, bytes([rng.randrange(12)]))
            tables.append(table)
        elif action < 0.7:
            matched = pool.match([bytes([rng.randrange(12)]) for _ in range(3)])
            distinct = list(dict.fromkeys(matched))
            pool.hold(distinct)
            tables.append(distinct)
        elif tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        pool.check_integrity(tables)
    for table in tables:
        pool.release(table)
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks
