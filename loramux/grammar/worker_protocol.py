"""The messages between a grammar service and its compile workers: MessagePack in frames of four length bytes, over pipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

import msgspec

from loramux.errors import Failure
from loramux.grammar.types import Constraint

_LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True, tag=True):
    """First message to a worker."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    cpu_s: float
    """Per job."""
    memory_bytes: int
    """Address space beyond what the worker has once it is ready."""


class Compile(msgspec.Struct, frozen=True, tag=True):
    constraint: Constraint


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has its libraries and vocabulary."""


class Vetted(msgspec.Struct, frozen=True, tag=True):
    """The constraint compiles within the limits, from this EBNF. It is compiled once more where it is used: handing over what the
    worker compiled is ten times the work (xgrammar writes its automata once per rule)."""

    grammar: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    failure: Failure


_encode = msgspec.msgpack.Encoder().encode
ToWorker = Setup | Compile
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
FromWorker = Ready | Vetted | Refused
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    body = _encode(message)
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """One message's bytes; None at the end of the stream, or where it breaks off."""
    header = _read_exactly(stream, _LENGTH_BYTES)
    return None if header is None else _read_exactly(stream, int.from_bytes(header, "little"))


def _read_exactly(stream: IO[bytes], num_bytes: int) -> bytes | None:
    content = stream.read(num_bytes)
    return content if len(content) == num_bytes else None
