"""What `refusals` lets through is enforced in full, and what is malformed or beyond that is named by its pointer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from loramux.errors import GrammarTooComplex
from loramux.grammar.coverage import at_pointer, refusals
from tests.grammar.matching import accepts, compile_schema

CASES = json.loads((Path(__file__).parent / "keywords.json").read_text())
SPELLED_OTHERWISE = {
    "integer 1.0": "1.0",
    "property order free": '{"b": 1, "a": 1}',
}
"""Valid texts of enforced cases that are never generated: the same value has another spelling, or another order of keys."""
MASKBENCH = Path(os.environ.get("LORAMUX_MASKBENCH", Path(__file__).parents[3] / "shared" / "schemas" / "maskbench.jsonl"))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_keyword_is_enforced_in_full_or_refused_by_pointer(case: dict[str, Any]) -> None:
    refused = refusals(case["schema"])
    if refused:
        for refusal in refused:
            at_pointer(case["schema"], refusal.pointer)
            assert refusal.pointer.endswith(refusal.keyword)
        return
    grammar = compile_schema(case["schema"])
    expected = [text for text in case["valid"] if text != SPELLED_OTHERWISE.get(case["name"])]
    assert [text for text in expected if not accepts(grammar, text)] == []
    assert [text for text in case["invalid"] if accepts(grammar, text)] == []


def test_most_keyword_cases_are_enforced() -> None:
    assert sum(not refusals(case["schema"]) for case in CASES) >= 66


@pytest.mark.parametrize(
    ("schema", "pointers"),
    [
        ({"type": "strng"}, ["/type"]),
        ({"type": []}, ["/type"]),
        ({"properties": []}, ["/properties"]),
        ({"required": "a"}, ["/required"]),
        ({"$ref": "#/$defs/none"}, ["/$ref"]),
        ({"$ref": "#nowhere"}, ["/$ref"]),
        ({"$ref": 5}, ["/$ref"]),
        ({"type": "string", "pattern": "("}, ["/pattern"]),
        ({"type": "string", "pattern": "^a(?!b)"}, ["/pattern"]),
        ({"type": "string", "pattern": "a\\b"}, ["/pattern"]),
        ({"type": "string", "minLength": -1}, ["/minLength"]),
        ({"type": "string", "minLength": True}, ["/minLength"]),
        ({"enum": []}, ["/enum"]),
        ({"enum": "abc"}, ["/enum"]),
        ({"anyOf": []}, ["/anyOf"]),
        ({"anyOf": [{"type": "string"}], "type": "integer"}, ["/type"]),
        ({"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": {"type": "string"}}}, ["/minLength"]),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["/oneOf"]),
        ({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {"const": 1}}}]}, ["/oneOf"]),
        ({"properties": {"a/b~c": {"not": {}}}}, ["/properties/a~1b~0c/not"]),
        ({"type": "array", "uniqueItems": True}, ["/uniqueItems"]),
        ({"type": "array", "items": {"contains": {}}}, ["/items/contains"]),
        ({"type": "object", "minProperties": 2}, ["/minProperties"]),
        ({"type": "number", "multipleOf": 0.01}, ["/multipleOf"]),
        ({"type": "integer", "minimum": 3, "maximum": 2}, ["/minimum"]),
        ({"type": "string", "format": "regex"}, ["/format"]),
        ({"type": "string", "pattern": "^a$", "format": "date"}, ["/format"]),
        ({"type": "object", "properties": {"me": {"$ref": "#"}}, "required": ["me"]}, ["", "/properties/me"]),
        ({"$ref": "#"}, ["", ""]),
        ({"anyOf": [{"$ref": "#"}, {"type": "string"}]}, [""]),
        ([], [""]),
        (None, [""]),
        ("x", [""]),
    ],
    ids=str,
)
def test_refusals_point_to_the_keyword(schema: Any, pointers: list[str]) -> None:
    assert sorted(refusal.pointer for refusal in refusals(schema)) == pointers


def test_everyday_schemas_are_enforced() -> None:
    address = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Person",
        "$defs": {
            "Address": address,
            "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]},
            "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}, "required": ["kind"]},
        },
        "type": "object",
        "properties": {
            "title": {"type": "string", "minLength": 1, "maxLength": 40, "description": "How to address them"},
            "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
            "score": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}], "default": None},
            "id": {"type": "string", "format": "uuid"},
            "born": {"type": "string", "format": "date"},
            "home": {"allOf": [{"$ref": "#/$defs/Address"}]},
            "pet": {
                "discriminator": {"propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            },
            "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "minItems": 1, "maxItems": 3},
            "notes": {"type": ["string", "null"]},
            "more": {"type": "object", "additionalProperties": {"type": "boolean"}},
        },
        "required": ["title", "age"],
        "additionalProperties": False,
    }
    assert refusals(schema) == []
    grammar = compile_schema(schema)
    value = {
        "title": 'Dr. "Who"\n',
        "age": 149,
        "score": 0.25,
        "id": "123e4567-e89b-12d3-a456-426614174000",
        "born": "2024-02-29",
        "home": {"city": "日本"},
        "pet": {"kind": "dog", "name": "Rex", "extra": [1, {"a": None}]},
        "tags": ["a", None],
        "notes": None,
        "more": {"x": True},
    }
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2), json.dumps(value, separators=(",", ":"))):
        assert accepts(grammar, text)
    wrongs = {"age": 150, "score": 1.01, "born": "2023-02-29", "home": {}, "pet": {"kind": "cow"}, "tags": [], "title": ""}
    for key, wrong in wrongs.items():
        assert not accepts(grammar, json.dumps({**value, key: wrong})), key


@pytest.mark.parametrize("spelled", ['"a"', '"\\u0061"', '"\\u00e9"', '"\\/"'])
def test_no_escape_smuggles_a_declared_name_past_its_schema(spelled: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "é": {"type": "integer"}, "/": {"type": "integer"}}}
    assert not accepts(compile_schema(schema), f'{{{spelled}: "x"}}')


def test_other_names_are_free() -> None:
    grammar = compile_schema({"type": "object", "properties": {"ab": {"type": "integer"}}})
    for name in ("", "a", "abc", "b", "é", 'q"', "\\", "\n", "a\tb", "\x01", "😀"):
        assert accepts(grammar, json.dumps({"ab": 1, name: "x"}, ensure_ascii=False)), name


@pytest.mark.parametrize(
    "text",
    [b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"', '"\\ud800"', '"\\udc00"', '"\\ud800\\u0041"', '"\x1f"', '"a\nb"', '"', '""" '],
    ids=repr,
)
def test_strings_are_whole_characters(text: str | bytes) -> None:
    for schema in ({"type": "string"}, {"type": "string", "minLength": 1}, {"type": "string", "pattern": "^[^a]*$"}, True):
        assert not accepts(compile_schema(schema), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": list(range(10_001))},
        {"properties": {f"p{index}": True for index in range(5_001)}},
        {"properties": {"k" * 5_000: True}},
        {"type": "string", "pattern": "a" * 9_000},
        {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(600)} | {"d600": True}},
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_schemas_out_of_bounds_are_too_complex(schema: Any) -> None:
    with pytest.raises(GrammarTooComplex):
        refusals(schema)


def _maskbench() -> list[dict[str, Any]]:
    if not MASKBENCH.exists():
        pytest.skip("no maskbench data here")
    with MASKBENCH.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _check_maskbench(cases: list[dict[str, Any]]) -> None:
    """Whatever is enforced accepts the valid instances and no other; the data has its keys in the schema's order."""
    num_enforced, wrongly_accepted, wrongly_refused = 0, [], []
    for case in cases:
        try:
            if refusals(case["schema"]):
                continue
            grammar = compile_schema(case["schema"])
        except GrammarTooComplex:
            continue
        num_enforced += 1
        for test in case["tests"]:
            taken = accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
            if taken and not test["valid"]:
                wrongly_accepted.append((case["id"], test["data"]))
            if test["valid"] and not taken:
                wrongly_refused.append((case["id"], test["data"]))
    print(f"{num_enforced} of {len(cases)} schemas enforced")
    assert wrongly_accepted == []
    assert wrongly_refused == []
    assert num_enforced > len(cases) / 3


def test_real_schemas() -> None:
    _check_maskbench(_maskbench()[::15])


@pytest.mark.slow
def test_all_real_schemas() -> None:
    _check_maskbench(_maskbench())
