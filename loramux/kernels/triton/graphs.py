"""Decode steps recorded once for each size of batch, and repeated with other numbers in the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

MAX_ROWS = 256
"""Larger decodes keep the device busy while the host queues them."""

Call = Callable[[], torch.Tensor]


def bucket_of(num_rows: int) -> int:
    """The size that a decode of so many rows is padded to."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    return -(-num_rows // 8) * 8


class Capture(Protocol):
    """Records a call; what it returns repeats the call on the same tensors and returns the same result's memory."""

    def __call__(self, call: Call) -> Call: ...


class CudaCapture:
    """Into CUDA graphs. They share one pool of memory, since they run one after another: a result is there until the next."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Call) -> Call:
        call()  # compiles what is not compiled yet, which must not happen while recording
        graph = torch.cuda.CUDAGraph()
        # Threads that load adapters may allocate pinned memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def call_again(call: Call) -> Call:
    """A `Capture` without a graph: every replay runs the call."""
    return call


class Graphs:
    """Recorded steps by what they depend on, and the buffer that all of them read their numbers from."""

    def __init__(self, num_words: int, device: torch.device, capture: Capture) -> None:
        with torch.inference_mode(False):
            self.buffer = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._capture = capture
        self._replays: dict[Hashable, Call] = {}

    def fits(self, packed: torch.Tensor) -> bool:
        return len(packed) <= len(self.buffer)

    def run(self, key: Hashable, packed: torch.Tensor, call: Call) -> torch.Tensor:
        """Move the step's numbers in and repeat what is recorded under the key, recorded of `call` where nothing is yet."""
        self.buffer[: len(packed)].copy_(packed, non_blocking=True)
        if key not in self._replays:
            self._replays[key] = self._capture(call)
        return self._replays[key]()
