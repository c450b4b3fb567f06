"""Text of a growing sequence of tokens: whole characters only, cut before the first stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from itertools import dropwhile, islice, takewhile
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
    """Pieces of a completion's text. Together they are what the completion adds to `tokenizer.decode(prompt ids)`, up to the first stop
    string that a token after the first `min_tokens` completes; earlier ones are text.

    So a SentencePiece word that continues a prompt keeps the space before it. A character that the prompt left unfinished is given whole
    if the completion finishes it, and not at all if not. `whole_start` keeps the first space even if the prompt has no text: a grammar
    has matched it.

    The first stop string is the one completed first, and of those completed by the same character the longest: how the text is split
    into tokens changes nothing. Held back is only what may be the start of a stop string, an unfinished character, or a run of up to
    32 byte-fallback tokens (the decoder lets the text of one depend on the whole run; a longer run is given out character by
    character, and may look different from `decode` where it is not valid UTF-8). The cost of a token does not grow with the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        prompt_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        whole_start: bool = False,
    ) -> None:
        self._decoder = _Decoder(tokenizer, prompt_token_ids, whole_start)
        self._stops = _StopStrings(stop)
        self._num_early = min_tokens
        """Tokens to come that end no stop string."""
        self._may_stop = min_tokens == 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, also where `finish` completed it."""
        return self._stops.found

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """The text that is certain now; nothing more after a stop string."""
        early, late = token_ids[: self._num_early], token_ids[self._num_early :]
        self._num_early -= len(early)
        return TextPiece((self._push(early) if early else "") + (self._push(late, may_stop=True) if late else ""), self._stops.found)

    def finish(self) -> str:
        """The rest of the text, when the sequence has ended."""
        if self._stops.found:
            return ""
        return self._stops.push(self._decoder.finish(), may_stop=self._may_stop) + self._stops.finish()

    def _push(self, token_ids: Sequence[int], *, may_stop: bool = False) -> str:
        self._may_stop = self._may_stop or may_stop
        return "" if self._stops.found else self._stops.push(self._decoder.push(token_ids), may_stop=may_stop)


class _Decoder:
    """`Tokenizer.decode`, special tokens skipped, piece by piece, of what follows a prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], whole_start: bool) -> None:
        self._tokenizer = tokenizer
        self._traits = _traits(tokenizer)
        self._window, self._run = self._end_of(prompt_token_ids)
        """Decoded together, the first `_num_given` characters of its text are given out; and the byte-fallback tokens at the end, not in
        the window yet, of a long run the last one."""
        if whole_start and not self._window:
            self._window = self._traits.plain[:1]
        text = self._decode(self._window)
        self._num_given = len(text)
        self._ends_open = not self._traits.byte_of and text.endswith(_UNFINISHED)
        """The text given ends in a character that the prompt may have left unfinished."""
        self._num_open_bytes = len(self._run)
        """Tokens of the run that are the prompt's."""
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

    def _end_of(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The last tokens with text, and after them the byte-fallback tokens of an unfinished character."""
        byte_of = self._traits.byte_of
        last = list(islice((id for id in reversed(token_ids) if id not in self._traits.special_ids), _WINDOW))[::-1]
        run = list(takewhile(byte_of.__contains__, reversed(last)))[::-1]
        before = last[: len(last) - len(run)][-_CONTEXT:]
        if not before:  # the run may begin within a character
            run = list(dropwhile(lambda id: byte_of[id] & 0xC0 == 0x80, run))
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        text = utf8.decode(bytes(byte_of[id] for id in run))
        num_whole = len(run) - len(utf8.getstate()[0])
        # one invalid byte makes all of a run's characters unreadable, those to come too
        return before if _UNFINISHED in text else before + run[:num_whole], run[num_whole:]

    def _push_byte(self, token_id: int) -> str:
        if self._long_run is not None:
            self._run = [token_id]
            return self._long_run.decode(bytes([self._traits.byte_of[token_id]]))
        self._run.append(token_id)
        if len(self._run) <= _LONGEST_RUN:
            return ""
        self._settle_open_bytes()
        text = self._give(hold_back=False)
        self._long_run = codecs.getincrementaldecoder("utf-8")("replace")
        return text + self._long_run.decode(self._bytes_of_run())

    def _close_run(self) -> str:
        """Another token follows the run, or nothing: its text no longer changes."""
        text = ""
        if self._long_run is None:
            self._settle_open_bytes()
            self._window += self._run
        else:
            text = self._long_run.decode(b"", final=True)
            self._window = self._run[-1:]
            self._num_given = len(self._decode(self._window))
        self._run, self._long_run = [], None
        return text

    def _settle_open_bytes(self) -> None:
        """Leave the prompt's bytes out unless those that follow finish their character."""
        if self._num_open_bytes and self._bytes_of_run().decode(errors="replace").startswith(_UNFINISHED):
            del self._run[: self._num_open_bytes]
        self._num_open_bytes = 0

    def _settle_open_end(self, text: str) -> None:
        """Give the prompt's last character anew if the tokens that follow have finished it."""
        last = text[self._num_given - 1 :]
        if last != _UNFINISHED:
            self._num_given -= not last.startswith(_UNFINISHED)
            self._ends_open = False

    def _bytes_of_run(self) -> bytes:
        return bytes(self._traits.byte_of[token_id] for token_id in self._run)

    def _give(self, *, hold_back: bool) -> str:
        """The window's new text. An unfinished character decodes to one replacement character at the end."""
        text = self._decode(self._window)
        if self._ends_open:
            self._settle_open_end(text)
        end = len(text) - int(hold_back and text.endswith(_UNFINISHED))
        given = text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        if len(self._window) > _WINDOW:
            num_held = len(text) - self._num_given
            self._window = self._window[-_CONTEXT:]
            self._num_given = len(self._decode(self._window)) - num_held
            self._ends_open = False
        return given

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)


class _Traits(NamedTuple):
    """What streaming needs to know of a tokenizer."""

    special_ids: frozenset[int]
    byte_of: dict[int, int]
    """The byte of each byte-fallback token; empty where the decoder has no byte fallback."""
    plain: list[int]
    """A token with visible text."""


@lru_cache(maxsize=8)
def _traits(tokenizer: Tokenizer) -> _Traits:
    special_ids = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    has_fallback = tokenizer.decoder is not None and b'"ByteFallback"' in tokenizer.decoder.__getstate__()
    byte_tokens = [(byte, tokenizer.token_to_id(f"<0x{byte:02X}>")) for byte in range(256)] if has_fallback else []
    byte_of = {id: byte for byte, id in byte_tokens if id is not None}
    ordinary = (id for id in range(tokenizer.get_vocab_size()) if id not in special_ids and id not in byte_of)
    plain = next((id for id in ordinary if tokenizer.decode([id]).isalnum()), None)
    return _Traits(special_ids, byte_of, [] if plain is None else [plain])


class _StopStrings:
    """Searches a growing text for several strings at once, after Knuth, Morris and Pratt: no character is looked at twice."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.found: str | None = None
        self._stops = tuple(stop for stop in stops if stop)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        """How much of each stop string the text ends with."""
        self._held = ""

    def push(self, text: str, *, may_stop: bool) -> str:
        """The text that no stop string can begin in; all before the first stop string once one is complete, if one may be."""
        if not self._stops:
            return text
        held = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            self._advance(character, may_stop)
            if self.found:
                return held[: position - len(self.found)]
        num_certain = len(held) - max(self._matched, default=0)
        self._held = held[num_certain:]
        return held[:num_certain]

    def finish(self) -> str:
        """The text held back, when no more follows; nothing after a stop string."""
        return "" if self.found else self._held

    def _advance(self, character: str, may_stop: bool) -> None:
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop) and not may_stop:
                matched = borders[-1]
            elif matched == len(stop) and len(stop) > len(self.found or ""):
                self.found = stop
            self._matched[index] = matched


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    for end in range(1, len(text)):
        length = borders[end - 1]
        while length and text[length] != text[end]:
            length = borders[length - 1]
        borders[end] = length + (text[length] == text[end])
    return borders
