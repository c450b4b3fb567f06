"""The `openai` client, unchanged, against the real server."""

from __future__ import annotations

import json

import httpx
import jsonschema
import openai
import pytest

from tests.e2e.conftest import World

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["bug", "question", "praise"]},
        "urgent": {"type": "boolean"},
        "level": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["kind", "urgent", "level"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "The keeper of the lighthouse"}]
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": SCHEMA}}


def test_models_lists_what_the_tenant_may_use(world: World) -> None:
    assert {model.id for model in world.server.client(world.acme_key).models.list()} == {"tiny", "tiny:alpha", "tiny:beta", "tiny:gamma"}
    assert {model.id for model in world.server.client(world.globex_key).models.list()} == {"tiny", "tiny:alpha"}
    assert world.server.client(world.globex_key).models.retrieve("tiny:alpha").id == "tiny:alpha"


def test_completion_whole_and_streamed_are_equal(world: World) -> None:
    client = world.server.client(world.acme_key)
    arguments = {"model": "tiny:beta", "prompt": "When the storm came", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert whole.model == "tiny:beta"
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_whole_and_streamed_are_equal(world: World) -> None:
    client = world.server.client(world.acme_key)
    arguments = {"model": "tiny:alpha", "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 1.0, "seed": 5}
    whole = client.chat.completions.create(**arguments)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**arguments, stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].finish_reason == whole.choices[0].finish_reason


def test_header_says_which_version_answered(world: World) -> None:
    raw = world.server.client(world.acme_key).completions.with_raw_response.create(model="tiny:alpha", prompt="a", max_tokens=1)
    digest = world.server.must("GET", "/adapters/alpha/versions/1")["digest"]
    assert raw.headers["x-loramux-model"] == f"tiny:alpha@1; digest={digest}"
    assert raw.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("model", ["tiny", "tiny:alpha", "tiny:beta@prod", "tiny:gamma@1"])
def test_json_schema_is_enforced(world: World, model: str) -> None:
    answer = world.server.client(world.acme_key).chat.completions.create(
        model=model, messages=MESSAGES, response_format=RESPONSE_FORMAT, max_tokens=200, temperature=1.0, seed=3
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


@pytest.mark.parametrize(
    ("constraint", "check"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-" and text[4:].isdigit()),
        ({"choice": ["yes", "no", "perhaps not"]}, lambda text: text in {"yes", "no", "perhaps not"}),
        ({"grammar": 'root ::= "(" [0-9] ("," [0-9])? ")"'}, lambda text: text[0] == "(" and text[-1] == ")"),
        ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    ],
)
def test_structured_outputs(world: World, constraint: dict[str, object], check: object) -> None:
    answer = world.server.client(world.acme_key).completions.create(
        model="tiny:beta", prompt="x", max_tokens=200, extra_body={"structured_outputs": constraint}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert check(answer.choices[0].text), answer.choices[0].text  # type: ignore[operator]


def test_logprobs(world: World) -> None:
    client = world.server.client(world.acme_key)
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    for entry in chat.choices[0].logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
    text = client.completions.create(model="tiny", prompt="The sea was", max_tokens=4, temperature=0, logprobs=2, echo=True)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert text.choices[0].text.startswith("The sea was")
    assert logprobs.token_logprobs[0] is None and all(value is not None for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens[:-4]) == "The sea was"


def test_three_choices_differ_and_each_is_the_same_again(world: World) -> None:
    client = world.server.client(world.acme_key)
    arguments = {"model": "tiny:alpha", "prompt": "Nothing, he says, ", "n": 3, "max_tokens": 12, "seed": 11}
    first, again = (client.completions.create(**arguments) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.usage is not None and first.usage.completion_tokens <= 36


def test_stop_strings_cut_the_text(world: World) -> None:
    client = world.server.client(world.acme_key)
    arguments = {"model": "tiny", "prompt": "In the morning", "max_tokens": 40, "seed": 2}
    free = client.completions.create(**arguments).choices[0].text
    stop = free[8:11]
    cut = client.completions.create(**arguments, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == free[: free.index(stop)]


def test_a_second_request_reads_the_cache_and_another_tenant_does_not(world: World) -> None:
    prompt = "The keeper of the lighthouse writes every evening what he has seen: the ships, the weather, the birds. " * 3

    def cached(key: str) -> int:
        usage = world.server.client(key).completions.create(model="tiny:alpha", prompt=prompt, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached(world.acme_key) == 0
    assert cached(world.acme_key) >= 32
    assert cached(world.globex_key) == 0


def test_errors_arrive_as_typed_exceptions(world: World) -> None:
    client = world.server.client(world.acme_key)

    def create(**changes: object) -> None:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **changes})

    with pytest.raises(openai.BadRequestError) as temperature:
        create(temperature=-1)
    assert temperature.value.param == "/temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="tiny:nobody")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as base:
        create(model="other")
    assert base.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        create(messages=[{"role": "user", "content": "birds over the water " * 4000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as schema:
        create(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array", "uniqueItems": True}}})
    assert schema.value.code == "unsupported_schema"
    assert isinstance(schema.value.body, dict)
    (keyword,) = schema.value.body["details"]["keywords"]
    assert keyword["pointer"] == "/response_format/json_schema/schema/uniqueItems" and keyword["keyword"] == "uniqueItems"
    with pytest.raises(openai.BadRequestError) as tools:
        create(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert tools.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError) as retired:
        create(extra_body={"guided_json": {}})
    assert retired.value.code == "unsupported_parameter"
    with pytest.raises(openai.AuthenticationError):
        world.server.client("lmx_acme.00000000_" + "0" * 64).models.list()
    with pytest.raises(openai.NotFoundError):
        world.server.client(world.globex_key).completions.create(model="tiny:beta", prompt="x", max_tokens=1)


def test_hanging_up_ends_the_request(world: World) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{world.server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {world.acme_key}"}
    ) as response:
        next(response.iter_lines())
