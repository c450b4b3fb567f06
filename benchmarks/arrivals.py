"""What long prompts that arrive do to the streams that are already answering."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import closed_loop
import httpx
from server import Server, infer_client

SETTLE_S = 1.0


class Decoding:
    """Streams that answer until they are cancelled, and the gaps between their tokens while `recording`."""

    def __init__(self, client: httpx.AsyncClient, model: str, num_streams: int, max_tokens: int, seed: str) -> None:
        rng = random.Random(seed)
        bodies = [closed_loop.completion(model, closed_loop.words(rng, 16), max_tokens) for _ in range(num_streams)]
        self.gap_s: list[float] = []
        self.recording = False
        self._num_started = 0
        self._all_started = asyncio.Event()
        self._num_streams = num_streams
        self._client = client
        self._tasks = [asyncio.create_task(self._follow(body)) for body in bodies]

    async def started(self) -> None:
        """Every stream has its first token. Raises what made one of them end before."""
        waiting = asyncio.create_task(self._all_started.wait())
        done, _ = await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in done & set(self._tasks):
            task.result()

    async def recorded(self, work: Callable[[], Any]) -> list[float]:
        """Seconds between tokens while `work` is awaited. Raises RuntimeError if a stream ended before it did."""
        self.gap_s, self.recording = [], True
        await work()
        self.recording = False
        if any(task.done() for task in self._tasks):
            raise RuntimeError("a stream ended too early to be measured")
        return self.gap_s

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, body: dict[str, Any]) -> None:
        last = None
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for data in closed_loop.events(response):
                if not any(choice["text"] for choice in data["choices"]):
                    continue
                now = time.perf_counter()
                if last is None:
                    self._started()
                elif self.recording:
                    self.gap_s.append(now - last)
                last = now

    def _started(self) -> None:
        self._num_started += 1
        if self._num_started == self._num_streams:
            self._all_started.set()


def measure(
    server: Server, key: str, *, num_streams: int, num_prompts: int, prompt_tokens: int, alone_s: float, max_tokens: int, seed: str
) -> dict[str, Any]:
    """Gaps between tokens of the streams alone, then while prompts come, each as the one before it is answered."""

    async def run() -> dict[str, Any]:
        rng = random.Random(seed)
        prompts = [closed_loop.completion(server.base, closed_loop.words(rng, prompt_tokens), 1) for _ in range(num_prompts)]
        async with infer_client(server, key) as client:
            decoding = Decoding(client, server.base, num_streams, max_tokens, seed)
            await decoding.started()
            await asyncio.sleep(SETTLE_S)
            alone = await decoding.recorded(lambda: asyncio.sleep(alone_s))
            arrived: list[dict[str, Any]] = []

            async def arrive() -> None:
                arrived.append(await closed_loop.send(client, prompts, 1))

            beside = await decoding.recorded(arrive)
            await decoding.cancel()
        if arrived[0]["errors"]:
            raise RuntimeError(arrived[0]["first_error"])
        return {"alone": spread(alone), "beside": spread(beside), "arrivals": {"ttft_ms_p50": arrived[0]["ttft_ms_p50"]}}

    return asyncio.run(run())


def spread(gap_s: list[float]) -> dict[str, Any]:
    p50, p99 = (closed_loop.quantile_ms(gap_s, q) for q in (0.5, 0.99))
    return {"tokens": len(gap_s), "ms_p50": p50, "ms_p99": p99}
