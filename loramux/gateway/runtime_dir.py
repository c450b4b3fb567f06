"""A private directory for sockets, with a path short enough for them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from loramux.errors import StartupFailed

MAX_SOCKET_PATH_BYTES = 107
_LONGEST_NAME = "/lmx-12345678/engine-0.ipc"


def make_runtime_dir() -> Path:
    """Make a directory, mode 0700, that a socket's path of at most 107 bytes can lie in. The caller removes it."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(os.fsencode(parent + _LONGEST_NAME)) <= MAX_SOCKET_PATH_BYTES and os.access(parent, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="lmx-", dir=parent))
    raise StartupFailed("no writable directory with a path short enough for sockets; set TMPDIR to one, such as /tmp")
