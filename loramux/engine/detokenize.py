"""Text of a growing sequence of tokens: whole characters only, cut before the first stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tokenizers import Tokenizer

_CONTEXT = 4
"""Tokens decoded again before new ones. An unfinished character has at most 3 bytes and a token at least one, so it lies within them
whole; and they have text, so that what decoders do to the start of a text is not done again."""
_WINDOW = 16
"""Tokens after which the window is cut back to its context."""
_LONGEST_RUN = 32
"""Byte tokens in a row that are held back."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextPiece(NamedTuple):
    text: str
    stop_string: str | None = None
    """The stop string that ended the text; it and all after it are left out."""


class TextStream:
    """Pieces of a sequence's text. Together they are `tokenizer.decode(all ids)` up to the first stop string.

    The first stop string is the one completed first, and of those completed by the same character the longest: how the text is split
    into tokens changes nothing. Held back is only what may be the start of a stop string, an unfinished character, or a run of up to
    32 byte-fallback tokens (the decoder lets the text of one depend on the whole run; a longer run is given out character by
    character, and may look different from `decode` where it is not valid UTF-8). The cost of a token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._decoder = _Decoder(tokenizer)
        self._stops = _StopStrings(stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, also where `finish` completed it."""
        return self._stops.found

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """The text that is certain now; nothing more after a stop string."""
        text = "" if self._stops.found else self._stops.push(self._decoder.push(token_ids))
        return TextPiece(text, self._stops.found)

    def finish(self) -> str:
        """The rest of the text, when the sequence has ended."""
        return "" if self._stops.found else self._stops.push(self._decoder.finish()) + self._stops.finish()


class _Decoder:
    """`Tokenizer.decode`, special tokens skipped, piece by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._traits = _traits(tokenizer)
        self._window: list[int] = []
        """Decoded together; the first `_num_given` characters of its text are given out."""
        self._num_given = 0
        self._run: list[int] = []
        """The byte-fallback tokens at the end, not in the window yet; of a long run the last one."""
        self._long_run: codecs.IncrementalDecoder | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            if token_id in self._traits.byte_of:
                parts.append(self._push_byte(token_id))
            elif token_id not in self._traits.special_ids:
                parts.append(self._close_run())
                self._window.append(token_id)
        parts.append(self._give(hold_back=True))
        return "".join(parts)

    def finish(self) -> str:
        return self._close_run() + self._give(hold_back=False)

    def _push_byte(self, token_id: int) -> str:
        if self._long_run is not None:
            self._run = [token_id]
            return self._long_run.decode(bytes([self._traits.byte_of[token_id]]))
        self._run.append(token_id)
        if len(self._run) <= _LONGEST_RUN:
            return ""
        text = self._give(hold_back=False)
        self._long_run = codecs.getincrementaldecoder("utf-8")("replace")
        return text + self._long_run.decode(bytes(self._traits.byte_of[each] for each in self._run))

    def _close_run(self) -> str:
        """Another token follows the run, or nothing: its text no longer changes."""
        text = ""
        if self._long_run is None:
            self._window += self._run
        else:
            text = self._long_run.decode(b"", final=True)
            self._window = self._run[-1:]
            self._num_given = len(self._decode(self._window))
        self._run, self._long_run = [], None
        return text

    def _give(self, *, hold_back: bool) -> str:
        """The window's new text. An unfinished character decodes to one replacement character at the end."""
        text = self._decode(self._window)
        end = len(text) - int(hold_back and text.endswith(_UNFINISHED))
        given = text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        if len(self._window) > _WINDOW:
            num_held = len(text) - self._num_given
            self._window = self._window[-_CONTEXT:]
            self._num_given = len(self._decode(self._window)) - num_held
        return given

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)


class _Traits(NamedTuple):
    """What streaming needs to know of a tokenizer."""

    special_ids: frozenset[int]
    byte_of: dict[int, int]
    """The byte of each byte-fallback token; empty where the decoder has no byte fallback."""


@lru_cache(maxsize=8)
def _traits(tokenizer: Tokenizer) -> _Traits:
    special_ids = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    has_fallback = tokenizer.decoder is not None and b'"ByteFallback"' in tokenizer.decoder.__getstate__()
    byte_tokens = [(byte, tokenizer.token_to_id(f"<0x{byte:02X}>")) for byte in range(256)] if has_fallback else []
    return _Traits(special_ids, {id: byte for byte, id in byte_tokens if id is not None})


class _StopStrings:
    """Searches a growing text for several strings at once, after Knuth, Morris and Pratt: no character is looked at twice."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.found: str | None = None
        self._stops = tuple(stop for stop in stops if stop)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        """How much of each stop string the text ends with."""
        self._held = ""

    def push(self, text: str) -> str:
        """The text that no stop string can begin in; all before the first stop string once one is complete."""
        held = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            self._advance(character)
            if self.found:
                return held[: position - len(self.found)]
        num_certain = len(held) - max(self._matched, default=0)
        self._held = held[num_certain:]
        return held[:num_certain]

    def finish(self) -> str:
        """The text held back, when no more follows; nothing after a stop string."""
        return "" if self.found else self._held

    def _advance(self, character: str) -> None:
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._matched[index] = matched
            if matched == len(stop) and len(stop) > len(self.found or ""):
                self.found = stop


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    for end in range(1, len(text)):
        length = borders[end - 1]
        while length and text[length] != text[end]:
            length = borders[length - 1]
        borders[end] = length + (text[length] == text[end])
    return borders
