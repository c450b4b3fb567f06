"""What a constraint's text may measure before anything walks or compiles it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from loramux.errors import GrammarTooComplex, InvalidRequest

MAX_TEXT_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_PROPERTIES = 5_000
MAX_ENUM_VALUES = 10_000
MAX_REFERENCE_CHAIN = 500
MAX_KEY_BYTES = 4 * 1024
MAX_PATTERN_BYTES = 8 * 1024


def check_text(text: str) -> None:
    """Cheap enough for the engine process: looks at the length alone. Raises `GrammarTooComplex`."""
    if len(text) > MAX_TEXT_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise GrammarTooComplex(f"the constraint is longer than {MAX_TEXT_BYTES} bytes")


def parse_json(text: str) -> Any:
    """Raises `InvalidRequest` for what is not JSON, `GrammarTooComplex` for what nests too deeply to be read."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise GrammarTooComplex(f"the JSON is nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise InvalidRequest("the JSON holds a lone surrogate") from None
    except ValueError as error:
        raise InvalidRequest(f"not valid JSON: {error}") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def check_size(schema: Any) -> None:
    """Bounds on a parsed schema. Raises `GrammarTooComplex`."""
    num_properties = num_enum_values = 0
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > 2 * MAX_DEPTH:
            raise GrammarTooComplex(f"the schema is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            pending.extend((item, depth + 1) for item in value)
        if not isinstance(value, dict):
            continue
        pending.extend((item, depth + 1) for item in value.values())
        num_properties += len(value["properties"]) if isinstance(value.get("properties"), dict) else 0
        num_enum_values += len(value["enum"]) if isinstance(value.get("enum"), list) else 0
        if any(len(key.encode()) > MAX_KEY_BYTES for key in value):
            raise GrammarTooComplex(f"a key is longer than {MAX_KEY_BYTES} bytes")
        if isinstance(value.get("pattern"), str) and len(value["pattern"].encode()) > MAX_PATTERN_BYTES:
            raise GrammarTooComplex(f"a pattern is longer than {MAX_PATTERN_BYTES} bytes")
    if num_properties > MAX_PROPERTIES:
        raise GrammarTooComplex(f"the schema has more than {MAX_PROPERTIES} properties")
    if num_enum_values > MAX_ENUM_VALUES:
        raise GrammarTooComplex(f"the schema has more than {MAX_ENUM_VALUES} enum values")
