"""The bodies that clients send, as pydantic models. Names and ranges are OpenAI's and vLLM's; `fields.py` reads bodies with them.

Strict: a number in a string is an error, not a number. Fields that are declared nowhere here are kept aside in `model_extra`.
Tags of unions are in angle brackets, so that the place of a mistake can be told without them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, StringConstraints, Tag

MAX_PROMPTS = 128
MAX_CHOICES = 128

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
NumTop = Annotated[int, Field(ge=0, le=20)]


class Body(BaseModel):
    """Unknown fields are accepted here and judged by `fields.refuse_unknown`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)


def _one_or_list(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<one>"


StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Stop = Annotated[
    Annotated[StopString, Tag("<one>")] | Annotated[list[StopString], Tag("<list>"), Field(max_length=16)], Discriminator(_one_or_list)
]


class StreamOptions(Body):
    include_usage: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """Accepted and without effect: a schema is always enforced."""


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def _schema_form(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<object>"


SchemaOrText = Annotated[Annotated[dict[str, JsonValue], Tag("<object>")] | Annotated[str, Tag("<text>")], Discriminator(_schema_form)]


class StructuredOutputs(Body):
    """Exactly one is given; `json` may be the text of a schema too, as vLLM has it."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: Annotated[str, StringConstraints(min_length=1)] | None = None
    choice: Annotated[list[Word], Field(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, StringConstraints(min_length=1)] | None = None


class GenerationBody(Body):
    """What both generating routes take."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    prompt_logprobs: NumTop | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024),
        ]
        | None
    ) = None
    bad_words: Annotated[list[Word], Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = Annotated[Annotated[str, Tag("<one>")] | Annotated[list[TextPart], Tag("<list>")], Discriminator(_one_or_list)]


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None


def _prompt_kind(value: Any) -> str:
    """Which of the four forms a prompt was meant to be, so that an error is said of that form alone."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    return {list: "<token_lists>", int: "<tokens>"}.get(type(first), "<texts>")


Tokens = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Tag("<texts>"), Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[list[Tokens], Tag("<token_lists>"), Field(max_length=MAX_PROMPTS)],
    Discriminator(_prompt_kind),
]


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompt
    logprobs: NumTop | None = None
    echo: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages, whose template writes them."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]
