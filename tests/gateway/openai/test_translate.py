from __future__ import annotations

import json
from typing import Any

import pytest

from loramux.engine.types import GenerationRequest, SamplingParams
from loramux.errors import (
    ContextLengthExceeded,
    GrammarTooComplex,
    InvalidRequest,
    NoEngine,
    UnsupportedParameter,
    UnsupportedSchema,
)
from loramux.gateway.openai import translate
from loramux.gateway.openai.fields import parse
from loramux.gateway.openai.translate import Target
from loramux.gateway.openai.wire import ChatBody, CompletionBody, GenerationBody
from loramux.gateway.tenancy.types import Principal
from loramux.grammar.types import Constraint
from tests.fakes import base_description

PRINCIPAL = Principal(tenant_id="acme", key_id="acme.1", scopes=frozenset({"infer"}), salt=b"s" * 32, weight=2.0)
TARGET = Target(base_description(vocab_size=100, eos_token_ids=(1,), max_model_len=64), max_num_seqs=8, adapter_digest="sha256:" + "a" * 64)
PROMPT = list(range(10, 20))
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "number"}}}


def letters(text: str) -> list[int]:
    return [ord(c) % 100 for c in text]


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def request_of(body: GenerationBody, prompt: list[int] = PROMPT) -> GenerationRequest:
    return translate.to_request(body, prompt, request_id="req_1", principal=PRINCIPAL, target=TARGET, encode=letters)


def test_defaults_are_openais() -> None:
    request = request_of(chat())
    assert request == GenerationRequest(
        id="req_1",
        tenant_id="acme",
        key_id="acme.1",
        prompt_token_ids=tuple(PROMPT),
        sampling=SamplingParams(max_tokens=54, seed=request.sampling.seed),
        salt=b"s" * 32,
        adapter_digest=TARGET.adapter_digest,
        weight=2.0,
    )
    assert request_of(completion()).sampling.max_tokens == 16
    assert request_of(completion(), PROMPT * 6).sampling.max_tokens == 4
    assert request_of(chat()).sampling.seed != request.sampling.seed


def test_every_parameter_arrives() -> None:
    body = chat(
        n=3,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=-1,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.2,
        stop=["a", "b"],
        stop_token_ids=[3],
        ignore_eos=True,
        min_tokens=2,
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=4,
        prompt_logprobs=0,
        logit_bias={"5": -100, "6": 1.5},
        priority=-3,
        response_format={"type": "json_object"},
    )
    request = request_of(body)
    assert (request.n, request.priority, request.constraint) == (3, -3, Constraint("json_object"))
    assert request.sampling == SamplingParams(
        max_tokens=9,
        seed=2**63 - 1,
        temperature=0.0,
        top_k=7,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        repetition_penalty=1.2,
        logit_bias={5: -100.0, 6: 1.5},
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(3,),
        ignore_eos=True,
        num_logprobs=4,
        num_prompt_logprobs=0,
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (completion(logprobs=0), (0, None)),
        (completion(logprobs=3, echo=True), (3, 3)),
        (completion(logprobs=3, echo=True, prompt_logprobs=5), (3, 5)),
        (completion(echo=True), (None, None)),
        (chat(logprobs=True), (0, None)),
        (chat(logprobs=False, top_logprobs=0), (None, None)),
    ],
)
def test_logprobs_of_both_apis(body: GenerationBody, expected: tuple[int | None, int | None]) -> None:
    sampling = request_of(body).sampling
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == expected


def test_top_p_zero_keeps_one_token_and_top_k_fits_the_vocabulary() -> None:
    sampling = request_of(chat(top_p=0)).sampling
    assert (sampling.top_k, sampling.top_p) == (1, 1.0)
    assert request_of(chat(top_k=-1)).sampling.top_k == 0
    assert request_of(chat(top_k=5000)).sampling.top_k == 100


@pytest.mark.parametrize(
    ("body", "num_prompt_tokens", "param"),
    [
        (chat(), 64, "/messages"),
        (completion(), 64, "/prompt"),
        (chat(max_tokens=55), 10, "/max_tokens"),
        (chat(max_completion_tokens=55, max_tokens=1), 10, "/max_completion_tokens"),
    ],
)
def test_context_length(body: GenerationBody, num_prompt_tokens: int, param: str) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        request_of(body, [5] * num_prompt_tokens)
    assert caught.value.param == param


def test_context_may_be_filled_exactly() -> None:
    assert request_of(chat(max_tokens=54)).sampling.max_tokens == 54
    assert request_of(chat(), [5] * 63).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("body", "prompt", "param"),
    [
        (chat(n=9), PROMPT, "/n"),
        (completion(), [], "/prompt"),
        (completion(), [100], "/prompt"),
        (chat(stop_token_ids=[100]), PROMPT, "/stop_token_ids"),
        (chat(logit_bias={"100": 1}), PROMPT, "/logit_bias"),
        (chat(min_tokens=5, max_tokens=4), PROMPT, "/min_tokens"),
        (chat(bad_words=["  "]), PROMPT, "/bad_words"),
        (chat(structured_outputs={}), PROMPT, "/structured_outputs"),
        (chat(structured_outputs={"regex": "a", "choice": ["b"]}), PROMPT, "/structured_outputs"),
        (chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}), PROMPT, "/structured_outputs"),
        (chat(structured_outputs={"json": "{"}), PROMPT, "/structured_outputs/json"),
        (chat(structured_outputs={"json": "[]"}), PROMPT, "/structured_outputs/json"),
        (chat(structured_outputs={"json": "[" * 5000}), PROMPT, "/structured_outputs/json"),
    ],
)
def test_what_the_model_cannot_take(body: GenerationBody, prompt: list[int], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(body, prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "num_prompts", "cls", "param"),
    [
        (completion(n=64), 3, InvalidRequest, "/n"),
        (chat(stream_options={"include_usage": True}), 1, InvalidRequest, "/stream_options"),
        (chat(top_logprobs=2), 1, InvalidRequest, "/top_logprobs"),
        (chat(stream=True, prompt_logprobs=1), 1, UnsupportedParameter, "/prompt_logprobs"),
        (completion(stream=True, echo=True, logprobs=1), 1, UnsupportedParameter, "/echo"),
    ],
)
def test_combinations(body: GenerationBody, num_prompts: int, cls: type[InvalidRequest], param: str) -> None:
    with pytest.raises(cls) as caught:
        translate.check_combinations(body, num_prompts)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "constraint", "pointer"),
    [
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}},
            Constraint("regex", "a+"),
            "/structured_outputs/regex",
        ),
        ({"response_format": {"type": "json_object"}}, Constraint("json_object"), "/response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
            Constraint("json_schema", '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"number"}}}'),
            "/response_format/json_schema/schema",
        ),
        (
            {"structured_outputs": {"json": ' {"const": "\u00e9"} '}},
            Constraint("json_schema", '{"const":"\u00e9"}'),
            "/structured_outputs/json",
        ),
        ({"structured_outputs": {"choice": ["a", "\u00e9"]}}, Constraint("choice", '["a", "\u00e9"]'), "/structured_outputs/choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Constraint("grammar", 'root ::= "a"'), "/structured_outputs/grammar"),
    ],
    ids=lambda value: "",
)
def test_constraints_and_where_they_stand(fields: dict[str, Any], constraint: Constraint, pointer: str) -> None:
    assert translate.constraint_of(chat(**fields)) == (constraint, pointer)


def test_a_constraint_too_long_for_the_engine_is_not_sent_to_it() -> None:
    long = {"type": "object", "properties": {f"p{i}": {} for i in range(50_000)}}
    with pytest.raises(GrammarTooComplex) as caught:
        request_of(chat(structured_outputs={"json": long}))
    assert caught.value.param == "/structured_outputs/json"


def test_no_constraint() -> None:
    assert translate.constraint_of(chat()) is None
    assert translate.constraint_of(chat(response_format={"type": "text"})) is None


def test_a_schema_refusal_points_into_the_body() -> None:
    placed = translate.constraint_of(chat(structured_outputs={"json": SCHEMA}))
    keywords = [{"pointer": "/properties/a/not", "keyword": "not", "reason": "not enforced"}]
    refusal = UnsupportedSchema("no", param="/properties/a/not", details={"keywords": keywords})
    moved = translate.placed_in_body(refusal, placed)
    assert isinstance(moved, UnsupportedSchema)
    assert moved.param == "/structured_outputs/json/properties/a/not"
    assert moved.details == {"keywords": [keywords[0] | {"pointer": "/structured_outputs/json/properties/a/not"}]}
    assert translate.placed_in_body(GrammarTooComplex("slow"), placed).param == "/structured_outputs/json"
    lost = NoEngine("gone")
    assert translate.placed_in_body(lost, placed) is lost


def test_cache_salt_only_narrows() -> None:
    ours = translate.narrowed_salt(b"tenant-a", "x")
    assert len(ours) == 32 and ours != translate.narrowed_salt(b"tenant-b", "x") != b"tenant-b"
    assert ours == translate.narrowed_salt(b"tenant-a", "x") != translate.narrowed_salt(b"tenant-a", "y")
    assert translate.narrowed_salt(b"tenant-a", None) == b"tenant-a"


def test_bad_words_with_and_without_a_space() -> None:
    ids = {"cat": [1], " cat": [2], "dog": [3, 4], " dog": [3, 5], "fox": [6], " fox": [7, 6]}
    assert translate.bad_words_ids(["cat", "dog", " fox"], lambda text: ids[text]) == ((1,), (2,), (3, 4), (6,))


def test_messages_for_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "ann"}]).messages
    joined = {"role": "user", "content": "a\nb", "name": "ann"}
    assert translate.template_messages(messages, knows_developer=False) == [{"role": "system", "content": "be brief"}, joined]
    assert translate.template_messages(messages, knows_developer=True)[0]["role"] == "developer"
