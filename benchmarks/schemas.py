"""Schemas of the kind that applications send, whose instances are all longer than a benchmark's answers."""

from __future__ import annotations

from typing import Any


def closed(**properties: Any) -> dict[str, Any]:
    """An object of these properties, all required, and no other."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 40, "maxItems": 60}


def text(length: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 3, "maxLength": length}


def one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


WHOLE, YES_OR_NO = {"type": "integer", "minimum": 0, "maximum": 999}, {"type": "boolean"}

SCHEMAS = (
    closed(
        invoice={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
        customer=closed(name=text(30), country=one_of("DE", "FR", "IT", "NL", "PL"), trade=YES_OR_NO),
        lines=many(closed(title=text(40), quantity=WHOLE, price={"type": "number"}, unit=one_of("piece", "box", "metre", "hour"))),
    ),
    closed(
        subject=text(60),
        tickets=many(
            closed(
                category=one_of("account", "billing", "defect", "delivery", "question"),
                priority=one_of("low", "normal", "high"),
                order={"anyOf": [WHOLE, {"type": "null"}]},
                summary=text(80),
                tags={"type": "array", "items": text(12), "minItems": 1, "maxItems": 3},
            )
        ),
    ),
    closed(
        station=text(20),
        readings=many(closed(at={"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"}, celsius={"type": "number"}, valid=YES_OR_NO)),
    ),
    closed(
        team=text(30),
        members=many(
            closed(name=text(30), age=WHOLE, role=one_of("author", "editor", "reader"), skills=closed(main=text(20), years=WHOLE))
        ),
    ),
)


def response_formats() -> list[dict[str, Any]]:
    """Each as a request's fields."""
    schemas = enumerate(SCHEMAS)
    return [{"response_format": {"type": "json_schema", "json_schema": {"name": f"s{i}", "schema": schema}}} for i, schema in schemas]
