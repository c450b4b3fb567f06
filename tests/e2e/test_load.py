from __future__ import annotations

import asyncio
import json
import random

import jsonschema
from openai import AsyncOpenAI

from tests.e2e.conftest import World
from tests.e2e.schemas import random_schema
from tests.e2e.server import assert_idle

NUM_REQUESTS = 200
NUM_STREAMS = 16


async def test_schema_requests_over_three_adapters_all_validate(world: World) -> None:
    seed = 20261129
    print(f"seed {seed}")
    rng = random.Random(seed)
    jobs = iter([(f"tiny:{rng.choice(sorted(world.adapters))}", random_schema(rng), rng.randrange(1 << 30)) for _ in range(NUM_REQUESTS)])
    num_valid = 0

    async def one(client: AsyncOpenAI, model: str, schema: dict[str, object], request_seed: int) -> None:
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Request {request_seed}"}],
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            seed=request_seed,
            max_tokens=300,
        )
        assert answer.choices[0].finish_reason == "stop", (schema, answer.choices[0])
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)

    async def stream(client: AsyncOpenAI) -> None:
        nonlocal num_valid
        for job in jobs:
            await one(client, *job)
            num_valid += 1

    async with AsyncOpenAI(base_url=f"{world.server.url}/v1", api_key=world.acme_key, max_retries=0, timeout=300) as client:
        await asyncio.gather(*(stream(client) for _ in range(NUM_STREAMS)))
    assert num_valid == NUM_REQUESTS
    assert_idle(world.server)
