from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapters import registry
from loramux.errors import StartupFailed
from loramux.gateway.store import client
from loramux.gateway.store.open import open_store


@pytest.mark.parametrize("url", ["redis://h:abc", "redis://h:99999", "redis://[x", "redis://:secret/x@h:6379", "unix:///nowhere?secret=1"])
async def test_a_url_that_can_not_be_used_is_a_failed_start_that_repeats_no_password(tmp_path: Path, url: str) -> None:
    with pytest.raises(StartupFailed, match="--store-url") as caught:
        async with open_store(url, tmp_path, tmp_path, 0):
            pass
    assert "secret" not in caught.value.message


def test_waiting_for_the_disk_ends_before_waiting_for_the_answer() -> None:
    assert max(registry._SYNC_TIMEOUT_MS, client._SYNC_TIMEOUT_MS) < client.TIMEOUT_S * 1000
