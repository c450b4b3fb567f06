from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapters.contents import ContentStore
from loramux.adapters.identity import content_digest
from loramux.adapters.registry import Registry
from loramux.errors import StoreUnavailable
from loramux.gateway.cli import serve
from loramux.gateway.settings import Settings
from loramux.gateway.store.client import Store, connect
from tests.gateway.admin.adapters import write_adapter


async def test_bytes_that_no_version_names_are_dropped_unless_another_store_may_name_them(store_url: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "one")
    files = tuple((adapter / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
    digest = content_digest(*files)
    store, contents = Store(connect(store_url), durable=False), ContentStore(tmp_path / "adapters")
    registry = Registry(store.client)
    for url, left in (("embedded", set()), (store_url, {digest}), ("embedded", {digest})):
        contents.put(digest, *files)
        await serve._drop_unnamed(contents, registry, tmp_path, url)
        assert contents.digests() == left
    await store.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [(StoreUnavailable("The store did not answer."), "--store-url"), (PermissionError(13, "Permission denied", "/x/store"), "/x/store")],
    ids=["store", "disk"],
)
def test_a_start_that_the_store_or_the_disk_fails_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(settings: Settings) -> None:
        raise error

    monkeypatch.setattr(serve, "_serve", fail)
    monkeypatch.setattr(serve, "log_to_stderr", lambda: None)
    assert serve.run_server(Settings(model="m")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("loramux: ") and said in line
