"""Formats, by examples from their standards."""

from __future__ import annotations

import json

import pytest

from loramux.grammar.formats import FORMATS
from tests.grammar.matching import accepts, compile_schema

EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "0004-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31", "2024-1-1"],
    ),
    "time": (["23:59:59Z", "00:00:00.123+05:30"], ["24:00:00Z", "12:00Z", "12:00:00", "12:60:00Z"]),
    "date-time": (["2024-02-29T23:59:59.5-00:00"], ["2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z", "2024-01-01T00:00:00"]),
    "duration": (["P1Y2M3D", "PT36H", "P4W", "P1DT12H", "PT1M30S"], ["P", "PT", "P1DT", "1D", "P1W2D", "PT1H2S"]),
    "uuid": (["123E4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "g23e4567-e89b-12d3-a456-426614174000"]),
    "ipv4": (["0.0.0.0", "255.249.199.99"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1::8", "1:2:3:4:5:6:7::"],
        [":", "1:2", "1::2::3", "1:2:3:4:5:6:7:8:9"],
    ),
    "email": (["a@example.com", "a.b+c@x.y", '"a b"@x'], ["a", "@x", "a@", "a..b@x", ".a@x", "a@-x"]),
    "uri": (
        ["https://u@example.com:80/a;b?c=d#e", "urn:isbn:1", "file:///a", "http://[::1]/", "a:"],
        ["//x", "a b:c", "http://a b", "1a:b"],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format(name: str) -> None:
    grammar = compile_schema({"type": "string", "format": name})
    valid, invalid = EXAMPLES[name]
    assert [text for text in valid if not accepts(grammar, json.dumps(text))] == []
    assert [text for text in invalid if accepts(grammar, json.dumps(text))] == []
