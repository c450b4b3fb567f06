from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.adapters.ref import NAME, ModelRef, check_alias, check_name, parse_model
from loramux.errors import InvalidRequest, ModelNotFound

SERVED = ("smollm2", "gpt-oss:120b")


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("smollm2", ModelRef("smollm2")),
        ("smollm2:tickets", ModelRef("smollm2", "tickets", alias="prod")),
        ("smollm2:tickets@canary", ModelRef("smollm2", "tickets", alias="canary")),
        ("smollm2:tickets@3", ModelRef("smollm2", "tickets", version=3)),
        ("gpt-oss:120b", ModelRef("gpt-oss:120b")),
        ("gpt-oss:120b:tickets@12", ModelRef("gpt-oss:120b", "tickets", version=12)),
        ("smollm2:a.b_c-d", ModelRef("smollm2", "a.b_c-d", alias="prod")),
        ("smollm2:tickets@3b", ModelRef("smollm2", "tickets", alias="3b")),
    ],
)
def test_names(requested: str, expected: ModelRef) -> None:
    ref = parse_model(requested, SERVED)
    assert ref == expected
    assert ref.requested == requested


@pytest.mark.parametrize(
    "requested",
    [
        "",
        "other",
        "other:tickets",
        "smollm2:",
        "smollm2:Tickets",
        "smollm2:../etc",
        "smollm2:tickets@",
        "smollm2:tickets@0",
        "smollm2:tickets@03",
        "smollm2:tickets@9999999999",
        "smollm2:tickets@Canary",
        "smollm2:tickets@a@b",
        "smollm2:tickets\n",
        "smollm2:" + "a" * 64,
        "gpt-oss:tickets",
        "smollm2@prod",
        ":tickets",
    ],
)
def test_what_is_not_a_model(requested: str) -> None:
    with pytest.raises(ModelNotFound):
        parse_model(requested, SERVED)


def test_a_long_name_is_not_repeated_whole() -> None:
    with pytest.raises(ModelNotFound) as raised:
        parse_model("x" * 100_000, SERVED)
    assert len(raised.value.message) < 400


@settings(deadline=None)
@given(st.from_regex(NAME, fullmatch=True), st.integers(1, 999_999_999))
def test_every_name_of_the_grammar_is_found(name: str, version: int) -> None:
    check_name(name)
    assert parse_model(f"gpt-oss:120b:{name}@{version}", SERVED) == ModelRef("gpt-oss:120b", name, version=version)


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_model_or_not_found(text: str) -> None:
    try:
        ref = parse_model(text, SERVED)
    except ModelNotFound:
        return
    assert ref.base in SERVED


def test_names_and_aliases_are_checked() -> None:
    for bad in ("", "-x", "A", "a/b", "a:b", "a" * 64):
        with pytest.raises(InvalidRequest):
            check_name(bad)
        with pytest.raises(InvalidRequest):
            check_alias(bad)
    check_name("3")
    with pytest.raises(InvalidRequest):
        check_alias("3")
