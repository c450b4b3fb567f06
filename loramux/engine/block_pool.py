"""KV blocks: reference counts, the free list, and the prefix cache over them.

A block is in one of three states:

    held     reference count > 0, by the sequences whose tables name it
    cached   count 0, key kept: a later sequence may take it back, until it is reused
    empty    count 0, no key

Free blocks (cached and empty) form one list in the order of reuse: empty ones first, then the least recently used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Owns the ids 0 to num_blocks - 1. Ask (`num_free`) before you act (`allocate`)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents can still be taken back."""
        return len(self._by_key) - sum(1 for block in self._by_key.values() if self._counts[block])

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks of no content, forgetting what the least recently used ones held. The caller has checked `num_free`."""
        return [self._reuse() for _ in range(num_blocks)]

    def _reuse(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The longest run of known blocks for a chain of keys. Changes nothing; `hold` them before anything else is allocated."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these are on the free list now: holding them takes that many from `num_free`."""
        return sum(1 for block in blocks if not self._counts[block])

    def num_held_only_by(self, tables: Iterable[Sequence[int]]) -> int:
        """How many blocks would become free if these tables were released."""
        references = Counter(block for table in tables for block in table)
        return sum(count == self._counts[block] for block, count in references.items())

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one reference to each."""
        for block in blocks:
            if not self._counts[block]:
                del self._free[block]
            self._counts[block] += 1

    def publish(self, block: int, key: bytes) -> None:
        """Make a held, full block findable. Where another block has this key already, that one stays."""
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block of a sequence's table; the tail becomes reusable before the head."""
        for block in reversed(blocks):
            self._counts[block] -= 1
            if not self._counts[block]:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def check_integrity(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Raise AssertionError unless counts, free list and keys agree with each other and with the tables of all sequences."""
        expected = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                expected[block] += 1
        assert self._counts == expected, "reference counts differ from the sequences' tables"
        assert set(self._free) == {block for block, count in enumerate(expected) if not count}, "free list"
        assert self._by_key == {key: block for block, key in enumerate(self._keys) if key is not None}, "keys"
