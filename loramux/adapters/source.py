"""Reading a PEFT directory of this machine, under the operator's roots only."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from loramux.adapters.added_tokens import ADDED_TOKENS_FILE
from loramux.adapters.contents import AdapterFiles, Contents
from loramux.adapters.peft_format import CONFIG_FILE, TENSORS_FILE
from loramux.adapters.peft_tensors import refuse_pickles
from loramux.errors import AdapterInvalid, InvalidRequest

_PARAM = "/source/uri"


class LocalSource:
    """PEFT directories named by `file:` URIs or absolute paths. Links are resolved before a path is compared with the roots."""

    def __init__(self, roots: Sequence[Path], *, max_bytes: int = 8 << 30) -> None:
        self._roots = tuple(root.resolve() for root in roots)
        self._max_bytes = max_bytes

    def read(self, uri: str) -> AdapterFiles:
        """The directory's files.

        Raises `InvalidRequest` if the URI is of another kind, or leads outside the roots (whether anything is there or not);
        `AdapterInvalid` if a file is missing, too large, or a pickle.
        """
        directory = self._resolve(_path_of(uri))
        try:
            names = {entry.name for entry in directory.iterdir()}
        except OSError as error:
            raise AdapterInvalid(f"{uri} is not a directory that can be read: {error.strerror}") from None
        if TENSORS_FILE not in names:
            refuse_pickles(names)
        contents = Contents(self._read_file(directory / CONFIG_FILE), self._read_file(directory / TENSORS_FILE))
        return AdapterFiles(contents, self._read_file(directory / ADDED_TOKENS_FILE) if ADDED_TOKENS_FILE in names else None)

    def _resolve(self, path: Path) -> Path:
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError, ValueError):
            raise _outside() from None
        if not any(resolved.is_relative_to(root) for root in self._roots):
            raise _outside()
        return resolved

    def _read_file(self, path: Path) -> bytes:
        try:
            descriptor = os.open(self._resolve(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            raise AdapterInvalid(f"{path.name} is missing, or can't be read") from None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise AdapterInvalid(f"{path.name} is not a file")
            if status.st_size > self._max_bytes:
                raise AdapterInvalid(f"{path.name} has {status.st_size} bytes, more than {self._max_bytes}")
            return file.read()


def _path_of(uri: str) -> Path:
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise InvalidRequest("a source must be a `file:` URI or a path", param=_PARAM) from None
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        path = unquote(parts.path)
    elif not parts.scheme:
        path = uri
    else:
        raise InvalidRequest("a source must be a `file:` URI or a path", param=_PARAM)
    if not path.startswith("/"):
        raise InvalidRequest("a source's path must be absolute", param=_PARAM)
    return Path(path)


def _outside() -> InvalidRequest:
    return InvalidRequest("the source is not under an adapter root of this server", param=_PARAM)
