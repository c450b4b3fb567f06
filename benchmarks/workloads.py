"""The workloads that serving is measured by, ours and other engines'."""

from __future__ import annotations

import re
from typing import NamedTuple


class Workload(NamedTuple):
    num_streams: int
    num_tokens_in: int
    num_tokens_out: int
    mixed: bool = False
    """Over eight adapters in turn, instead of the base."""

    def __str__(self) -> str:
        return f"{self.num_streams}x{self.num_tokens_in}/{self.num_tokens_out}{'+lora' if self.mixed else ''}"


def parse_workload(text: str) -> Workload:
    """Of `STREAMSxIN/OUT`, with `+lora` at its end for eight adapters mixed. Raises ValueError."""
    match = re.fullmatch(r"(\d+)x(\d+)/(\d+)(\+lora)?", text)
    if match is None or not all(map(int, match.group(1, 2, 3))):
        raise ValueError(text)
    streams, tokens_in, tokens_out = map(int, match.group(1, 2, 3))
    return Workload(streams, tokens_in, tokens_out, mixed=match.group(4) is not None)


SUITE = tuple(parse_workload(text) for text in ("1x16/128", "16x16/128", "32x16/128", "16x128/64", "16x128/64+lora", "1x512/1"))
"""The last is a prefill: its `in_tok_s` counts."""
