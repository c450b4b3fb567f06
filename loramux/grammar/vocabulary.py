"""The bytes of every token of a tokenizer.json, which is what a grammar matches."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.errors import StartupFailed

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """Filled by `read_vocabulary`."""

    token_bytes: tuple[bytes, ...]
    """[vocab_size]; empty for what is never generated as text: special tokens, padding, ids without a token."""
    eos_token_ids: tuple[int, ...]
    digest: str
    """Of the file, the size and the end-of-sequence ids together."""


def read_vocabulary(tokenizer_json: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece BPE with byte fallback (Llama 2, Mistral). `vocab_size` is the width of
    the logits, padding included.

    Raises `StartupFailed` for another kind of tokenizer, and for end-of-sequence ids that are none or out of range.
    """
    content = tokenizer_json.read_bytes()
    tokenizer = json.loads(content)
    if not eos_token_ids or not all(0 <= token_id < vocab_size for token_id in eos_token_ids):
        raise StartupFailed(f"grammars need end-of-sequence ids below the vocabulary's size {vocab_size}, got {list(eos_token_ids)}")
    token_bytes = [b""] * vocab_size
    decode = _decoder(tokenizer)
    for piece, token_id in _pieces(tokenizer["model"]["vocab"]):
        if token_id < vocab_size:
            token_bytes[token_id] = decode(piece)
    for added in tokenizer.get("added_tokens") or ():
        if added["id"] < vocab_size:
            token_bytes[added["id"]] = b"" if added["special"] else added["content"].encode()
    for token_id in eos_token_ids:
        token_bytes[token_id] = b""
    identity = f"{vocab_size}:{sorted(eos_token_ids)}:".encode()
    return Vocabulary(tuple(token_bytes), tuple(eos_token_ids), hashlib.sha256(identity + content).hexdigest())


def _pieces(vocab: Any) -> list[tuple[str, int]]:
    return list(vocab.items()) if isinstance(vocab, dict) else [(piece, token_id) for token_id, (piece, _) in enumerate(vocab)]


def _decoder(tokenizer: dict[str, Any]) -> Any:
    kinds = {part.get("type") for name in ("decoder", "pre_tokenizer") for part in _parts(tokenizer.get(name))}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if "ByteFallback" in kinds or tokenizer["model"].get("byte_fallback"):
        return _byte_fallback
    raise StartupFailed("the tokenizer is neither byte-level nor byte-fallback; grammars can't be matched on its tokens")


def _parts(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    if component is None:
        return []
    return [component, *(component.get("decoders") or ()), *(component.get("pretokenizers") or ())]


class _ByteLevel:
    """GPT-2's spelling of bytes as printable characters."""

    def __init__(self) -> None:
        kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        self._byte_of = {chr(byte): byte for byte in kept}
        moved = [byte for byte in range(256) if byte not in set(kept)]
        self._byte_of.update({chr(256 + index): byte for index, byte in enumerate(moved)})

    def __call__(self, piece: str) -> bytes:
        if not all(character in self._byte_of for character in piece):
            return piece.encode()
        return bytes(self._byte_of[character] for character in piece)


def _byte_fallback(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
