from __future__ import annotations

from contextlib import nullcontext

import pytest

from loramux.errors import StoreUnavailable
from loramux.gateway.cli import serve
from loramux.gateway.settings import Settings


@pytest.mark.parametrize(
    ("error", "said"),
    [(StoreUnavailable("The store did not answer."), "--store-url"), (PermissionError(13, "Permission denied", "/x/store"), "/x/store")],
    ids=["store", "disk"],
)
def test_a_start_that_the_store_or_the_disk_fails_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(settings: Settings, ground: object) -> None:
        raise error

    monkeypatch.setattr(serve, "_serve", fail)
    monkeypatch.setattr(serve, "_ground", nullcontext)
    monkeypatch.setattr(serve, "log_to_stderr", lambda: None)
    assert serve.run_server(Settings(model="m")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("loramux: ") and said in line
