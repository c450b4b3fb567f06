"""The checkpoint's tokenizer and chat template without transformers: `tokenizers`, and jinja2 in a sandbox.

Token ids equal those of transformers. Chats are encoded as with its `sanitize_control_tokens=True`: a control token spelled out
in a message is plain text, so a user can't close a turn or open one for the system.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from loramux.errors import InvalidRequest, StartupFailed
from loramux.gateway.chat_template import ChatTemplate

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARK_START, _MARK_END = "\U000f0000", "\U000f0001"
"""Private-use characters around a control token that a client spelled out, while the template is rendered."""


class EchoedText(NamedTuple):
    """A prompt as an answer repeats it."""

    text: str
    token_ids: tuple[int, ...]
    starts: tuple[int, ...]
    """Characters of `text` before each token."""


class TextOffset:
    """Counts the characters before each token, though a token may end within one."""

    def __init__(self, num_chars: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_chars = num_chars

    def advance(self, token_bytes: bytes) -> int:
        before = self.num_chars
        self.num_chars += len(self._decoder.decode(token_bytes))
        return before


class ChatTokenizer:
    """Text and messages to token ids and back. Safe to call from several threads.

    `files_dir` holds tokenizer.json, and tokenizer_config.json or chat_template.jinja where the checkpoint has them. Raises
    `StartupFailed` if they can't be read.
    """

    def __init__(self, files_dir: Path) -> None:
        config = _read_json(files_dir / "tokenizer_config.json")
        self._special_tokens = _named_tokens(config, _read_json(files_dir / "special_tokens_map.json"))
        self._tokenizer = _load(files_dir / "tokenizer.json", self._special_tokens)
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._byte_level = _has_decoder(self._tokenizer, "ByteLevel")
        source = _template_source(files_dir, config)
        self._template = None if source is None else ChatTemplate(source, self._special_tokens)
        control = self._control_tokens(config.get("chat_control_tokens"))
        self._control_re = _any_of(control)
        self._marked_re = re.compile(f"{_MARK_START}({self._control_re.pattern}){_MARK_END}|[{_MARK_START}{_MARK_END}]")

    @property
    def vocab_size(self) -> int:
        """Tokens that have a string, added ones included; the model's own vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def knows_developer_role(self) -> bool:
        """True if the chat template treats the role `developer` by itself."""
        return self._template is not None and "developer" in self._template.literal_text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens in `text` are parsed; `add_special_tokens` adds those the tokenizer puts around a text, such as bos."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_echoed(self, text: str) -> EchoedText:
        """The ids of `encode(text)`, and where each begins in `text`; one that the tokenizer puts around it has no width."""
        encoding = self._tokenizer.encode(text)
        return self._echoed(text, encoding.ids, encoding.special_tokens_mask)

    def decode_echoed(self, token_ids: Sequence[int]) -> EchoedText:
        """The text of a prompt given as tokens, special ones spelled out, and where each begins in it."""
        return self._echoed(self.decode(token_ids), token_ids, [0] * len(token_ids))

    def is_special(self, token_id: int) -> bool:
        """True for a token that the text of an answer leaves out."""
        return (added := self._added.get(token_id)) is not None and added.special

    def _echoed(self, text: str, token_ids: Sequence[int], added: Sequence[int]) -> EchoedText:
        """What the tokens say beyond `text` is the space that a tokenizer puts before a text and takes off it again."""
        offset = TextOffset()
        starts = [
            offset.advance(b"" if is_added else self.token_bytes(token_id)) for token_id, is_added in zip(token_ids, added, strict=True)
        ]
        surplus = max(0, offset.num_chars - len(text))
        return EchoedText(text, tuple(token_ids), tuple(min(max(0, start - surplus), len(text)) for start in starts))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for, not always whole characters; empty for an id that has no token."""
        if (added := self._added.get(token_id)) is not None:
            return added.content.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return b"".join(_unicode_to_byte().get(c, c.encode()) for c in token)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
    ) -> str:
        """The chat as text, control tokens of the client's left as they are. Raises `InvalidRequest`."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="/messages")
        return self._template.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of the chat. The template writes special tokens itself, so none are added around it. Raises `InvalidRequest`."""
        if not self._spelled_out([messages, tools]):
            return self.encode(self.render_chat(messages, tools, add_generation_prompt=add_generation_prompt), add_special_tokens=False)
        marked, marked_tools = self._mark(messages), self._mark(tools)
        return self._encode_marked(self.render_chat(marked, marked_tools, add_generation_prompt=add_generation_prompt))

    def _control_tokens(self, listed: Sequence[str] | None) -> list[str]:
        def is_control(token: AddedToken) -> bool:
            if token.special:
                return True
            if listed is not None:
                return token.content in listed
            return self._template is not None and token.content in self._template.literal_text and not token.content.isspace()

        return [token.content for token in self._added.values() if is_control(token)]

    def _spelled_out(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._control_re.search(value) is not None
        if isinstance(value, Mapping):
            return any(self._spelled_out(item) for item in value.values())
        return isinstance(value, list | tuple) and any(self._spelled_out(item) for item in value)

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            clean = value.replace(_MARK_START, "").replace(_MARK_END, "")
            return self._control_re.sub(f"{_MARK_START}\\g<0>{_MARK_END}", clean)
        if isinstance(value, Mapping):
            return {key: self._mark(item) for key, item in value.items()}
        return [self._mark(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode_marked(self, chat: str) -> list[int]:
        """Odd pieces of the split are marked tokens, or None for a mark that the template parted from its token."""
        pieces = self._marked_re.split(chat)
        newline_ids = self.encode("\n", add_special_tokens=False)
        token_ids = self.encode(pieces[0], add_special_tokens=False)
        for position, piece in enumerate(pieces[1:], start=1):
            if piece:
                token_ids += self._encode_inside(piece, newline_ids, as_text=position % 2 == 1)
        return token_ids

    def _encode_inside(self, piece: str, newline_ids: list[int], *, as_text: bool) -> list[int]:
        """Encode after a newline, so that no prefix space of the start of a text is added, and drop the newline again."""

        def encode(text: str) -> list[int]:
            return self._encode_plain(text) if as_text else self.encode(text, add_special_tokens=False)

        token_ids = encode("\n" + piece)
        starts_clean = token_ids[: len(newline_ids)] == newline_ids
        token_ids = token_ids[len(newline_ids) :] if starts_clean else encode(piece)
        if as_text and self._tokenizer.token_to_id(piece) in token_ids:
            raise InvalidRequest(f"the control token {piece!r} can't be written as text with this model", param="/messages")
        return token_ids

    def _encode_plain(self, text: str) -> list[int]:
        """Without matching any added token, special or not."""
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        splits = [text]
        if tokenizer.pre_tokenizer is not None:
            splits = [split for split, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for split in splits for token in tokenizer.model.tokenize(split)]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupFailed(f"{path.name} of the checkpoint can't be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _named_tokens(config: Mapping[str, Any], fallback: Mapping[str, Any]) -> dict[str, str]:
    values = {name: config.get(name) or fallback.get(name) for name in _NAMED_TOKENS}
    return {name: value["content"] if isinstance(value, dict) else str(value) for name, value in values.items() if value}


def _load(path: Path, special_tokens: Mapping[str, str]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise StartupFailed(f"{path.name} of the checkpoint can't be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens.values() if token not in known])
    return tokenizer


def _has_decoder(tokenizer: Tokenizer, kind: str) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return any(part.get("type") == kind for part in decoder.get("decoders", [decoder]))


def _template_source(files_dir: Path, config: Mapping[str, Any]) -> str | None:
    file = files_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


@lru_cache
def _unicode_to_byte() -> dict[str, bytes]:
    """The inverse of the printable alphabet that byte-level BPE writes bytes in (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + i): bytes([byte]) for i, byte in enumerate(shifted)}
