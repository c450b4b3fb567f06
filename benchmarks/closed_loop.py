"""A closed loop of streamed completions on an OpenAI-compatible server: each stream sends its next request when the last one ended."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any, NamedTuple

import httpx

VOCABULARY = (
    "able air animal apple arm autumn bank bed bird black boat bread bridge bright broken camp cat chair clean cloud coat cold "
    "cook corn dance deep dog dream drive early earth east farm fast field fire fish floor flower forest free garden glass gold "
    "grass green ground hair happy heart heavy hill horse hot ice island key kitchen lake lamp large late leaf letter light long "
    "map market milk moon morning mountain mouth narrow north ocean old orange paper path pen plain plant quick quiet rain red "
    "rice ring river road rock round salt sand sea sharp ship short silver sky sleep small snow soft song south spring star stone "
    "storm street strong summer sun sweet table tall tree valley village voice walk wall warm watch west wheel white wide wild "
    "wind window winter wood yellow young"
)
"""Common words, each a token of its own to most tokenizers."""

WORDS = VOCABULARY.split()


class Load(NamedTuple):
    """What to send. Requests take the models in turn."""

    models: Sequence[str]
    num_streams: int
    num_requests: int
    num_words_in: int
    """Words of each prompt: as many tokens with most tokenizers; `in_tok_s` counts those the server reports."""
    num_tokens_out: int
    seed: str
    """Different for each load of one server: a prompt seen before would be read from the prefix cache."""
    fields: Sequence[Mapping[str, Any]] = ({},)
    """More fields of the requests' bodies, taken in turn as the models are."""


@dataclass
class Tally:
    num_tokens_in: int = 0
    num_cached_tokens: int = 0
    num_tokens_out: int = 0
    first_s: list[float] = field(default_factory=list)
    """Time to the first token of each request."""
    gap_s: list[float] = field(default_factory=list)
    """Time between the events of a request that carry text."""
    errors: list[str] = field(default_factory=list)
    num_done: int = 0

    def figures(self, wall_s: float) -> dict[str, Any]:
        return {
            "requests": self.num_done,
            "errors": len(self.errors),
            "out_tok_s": round(self.num_tokens_out / wall_s, 1),
            "completion_tokens": self.num_tokens_out,
            "prompt_tokens": self.num_tokens_in,
            "cached_tokens": self.num_cached_tokens,
            "in_tok_s": round(self.num_tokens_in / wall_s, 1),
            "ttft_ms_p50": quantile_ms(self.first_s, 0.5),
            "ttft_ms_p99": quantile_ms(self.first_s, 0.99),
            "itl_ms_p50": quantile_ms(self.gap_s, 0.5),
            "itl_ms_p99": quantile_ms(self.gap_s, 0.99),
            "wall_s": round(wall_s, 2),
        }


def quantile_ms(values: Sequence[float], q: float) -> float | None:
    """The nearest-rank quantile; None of nothing."""
    return round(sorted(values)[min(len(values) - 1, int(q * len(values)))] * 1e3, 1) if values else None


async def run(client: httpx.AsyncClient, load: Load) -> dict[str, Any]:
    """Send the load and return its figures. The client carries the server's address and the key."""
    rng = random.Random(load.seed)
    turns = zip(cycle(load.models), cycle(load.fields), range(load.num_requests), strict=False)
    bodies = [completion(model, words(rng, load.num_words_in), load.num_tokens_out) | fields for model, fields, _ in turns]
    return await send(client, bodies, load.num_streams)


def words(rng: random.Random, num_words: int) -> str:
    """Each with a space before it, the first too, which many tokenizers would split without."""
    return "".join(f" {word}" for word in rng.choices(WORDS, k=num_words))


def completion(model: str, prompt: str, num_tokens_out: int) -> dict[str, Any]:
    """The body of a streamed request of exactly so many tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens_out,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def send(client: httpx.AsyncClient, bodies: Sequence[Mapping[str, Any]], num_streams: int) -> dict[str, Any]:
    """Send the requests, the next of them whenever one of the streams is free, and return their figures."""
    tally, left = Tally(), iter(bodies)
    start, start_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(stream(client, left, tally) for _ in range(num_streams)))
    wall_s = time.perf_counter() - start
    figures = tally.figures(wall_s) | {"client_cpu": round((time.process_time() - start_cpu) / wall_s, 3)}
    return figures | ({"first_error": tally.errors[0]} if tally.errors else {})


async def stream(client: httpx.AsyncClient, bodies: Iterator[Mapping[str, Any]], tally: Tally) -> None:
    for body in bodies:
        try:
            await complete(client, body, tally)
            tally.num_done += 1
        except (httpx.HTTPError, RuntimeError) as error:
            tally.errors.append(f"{type(error).__name__}: {error}"[:300])


async def complete(client: httpx.AsyncClient, body: Mapping[str, Any], tally: Tally) -> None:
    """One request. Raises RuntimeError if it is refused, fails, or ends without `[DONE]`."""
    times = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code} {(await response.aread()).decode()}")
        async for data in events(response):
            if any(choice["text"] for choice in data["choices"]):
                times.append(time.perf_counter())
            if usage := data.get("usage"):
                tally.num_tokens_in += usage["prompt_tokens"]
                tally.num_cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                tally.num_tokens_out += usage["completion_tokens"]
    gaps = [after - before for before, after in pairwise(times)]
    tally.first_s += gaps[:1]
    tally.gap_s += gaps[1:]


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each event up to `[DONE]`."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data:"):
            data = json.loads(line.removeprefix("data:"))
            if "error" in data:
                raise RuntimeError(data["error"]["message"])
            yield data
    raise RuntimeError("the stream ended without [DONE]")
