"""The bytes of adapters on disk, by digest."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from loramux.adapters.identity import content_digest
from loramux.adapters.peft_format import CONFIG_FILE, TENSORS_FILE
from loramux.errors import AdapterInvalid, NotFound

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LEFTOVER_AGE_S = 3600.0


class Contents(NamedTuple):
    """The two files of a PEFT adapter that are served."""

    config: bytes
    tensors: bytes


class AdapterFiles(NamedTuple):
    """What a source or an upload has of an adapter."""

    contents: Contents
    added_tokens: bytes | None = None
    """`added_tokens.json`. Only registration reads it, so it is not stored."""


class ContentStore:
    """One directory per digest under `directory`. An entry is there whole or not at all, whenever the process or the machine stops.

    Calls block on the disk; callers on an event loop use a thread. Any number of threads and processes may share the directory.
    """

    def __init__(self, directory: Path) -> None:
        self._entries = directory / "sha256"
        self._unfinished = directory / "unfinished"
        self._entries.mkdir(parents=True, exist_ok=True)
        self._unfinished.mkdir(exist_ok=True)
        self._sweep()

    def has(self, digest: str) -> bool:
        return _DIGEST.fullmatch(digest) is not None and self._entry(digest).is_dir()

    def get(self, digest: str) -> Contents:
        """Read and verify. Raises `NotFound` if the digest is not there, or what is there is not it any more."""
        contents = self._read(digest)
        if _digest_or_none(contents) != digest:
            raise NotFound(f"the stored adapter {digest} is damaged")
        return contents

    def verify(self, digest: str) -> bool:
        """Whether the digest is there and intact."""
        try:
            self.get(digest)
        except NotFound:
            return False
        return True

    def put(self, digest: str, config: bytes, tensors: bytes) -> None:
        """Store on disk, fsynced; an intact entry is kept, a damaged one replaced.

        Raises `AdapterInvalid` if the bytes have another digest.
        """
        actual = content_digest(config, tensors)
        if actual != digest:
            raise AdapterInvalid(f"the adapter's bytes have the digest {actual}, not {digest}")
        if self.has(digest):
            if self.verify(digest):
                return
            self.delete(digest)
        self._publish(self._write(config, tensors), self._entry(digest))

    def delete(self, digest: str) -> None:
        """Free the bytes; nothing happens if they are not there."""
        if not self.has(digest):
            return
        doomed = self._unfinished / uuid.uuid4().hex
        try:
            self._entry(digest).rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)  # what is left, or swept by another process meanwhile, is no entry

    def digests(self) -> set[str]:
        return {f"sha256:{entry.name}" for entry in self._entries.iterdir()}

    def _entry(self, digest: str) -> Path:
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise NotFound("no adapter has such a digest")
        return self._entries / match[1]

    def _read(self, digest: str) -> Contents:
        entry = self._entry(digest)
        try:
            return Contents((entry / CONFIG_FILE).read_bytes(), (entry / TENSORS_FILE).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"the adapter {digest} is not stored here") from None

    def _write(self, config: bytes, tensors: bytes) -> Path:
        directory = self._unfinished / uuid.uuid4().hex
        directory.mkdir()
        _write_synced(directory / CONFIG_FILE, config)
        _write_synced(directory / TENSORS_FILE, tensors)
        _sync_directory(directory)
        return directory

    def _publish(self, directory: Path, entry: Path) -> None:
        try:
            directory.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
            shutil.rmtree(directory)  # another writer was first, with the same content
        _sync_directory(self._entries)

    def _sweep(self) -> None:
        """Remove what a crash left; younger leftovers may be another process's work."""
        for leftover in self._unfinished.iterdir():
            with contextlib.suppress(FileNotFoundError):  # its writer has just finished it
                if time.time() - leftover.stat().st_mtime > _LEFTOVER_AGE_S:
                    shutil.rmtree(leftover, ignore_errors=True)


def _digest_or_none(contents: Contents) -> str | None:
    try:
        return content_digest(contents.config, contents.tensors)
    except AdapterInvalid:
        return None


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
