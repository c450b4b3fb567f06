from __future__ import annotations

import itertools

from loramux.engine.prefix import block_key, root_key


def test_every_field_changes_the_root_and_no_field_poses_as_another() -> None:
    values = ["", "a", "aa", "salt", "adapter"]
    roots = {root_key(base, adapter, salt.encode()) for base, adapter, salt in itertools.product(values, [None, *values], values)}
    assert len(roots) == len(values) * (len(values) + 1) * len(values)


def test_a_key_depends_on_parent_tokens_and_order() -> None:
    keys = {block_key(parent, tokens) for parent in (b"p" * 32, b"q" * 32) for tokens in ([1, 2], [2, 1], [258, 0])}
    assert len(keys) == 6
