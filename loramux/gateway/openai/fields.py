"""Reads a request body: JSON to a wire model, with every mistake told by a JSON pointer, and no field ignored that could matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from loramux.errors import InvalidRequest, UnsupportedParameter
from loramux.gateway.http_errors import json_pointer
from loramux.gateway.openai.wire import Body, ChatBody

B = TypeVar("B", bound=Body)

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prediction", "request_id", "include_obfuscation"),
    }
)
"""Fields that can't change what is generated."""

NO_REQUEST: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "tool_calls": ([],),
    "annotations": ([],),
    "modalities": (["text"],),
    "enforcement": ("strict",),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "continuous_usage_stats": (False,),
    "allowed_token_ids": ([],),
}
"""Values of fields not built that ask for nothing."""

NO_REQUEST_IN_CHAT = NO_REQUEST | {"add_special_tokens": (False,)}
"""A chat's template writes the special tokens."""

_TOOL_CALLS = ("tool_calls", "function_call")

_MESSAGES = {"missing": "this field is required", "model_type": "the body should be a JSON object"}


def parse(model: type[B], body: bytes) -> B:
    """Raises `InvalidRequest` for anything malformed, `UnsupportedParameter` for a field that is not known to be harmless."""
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        raise _tool_use(error, body) or _first_mistake(error) from None
    refuse_unknown(parsed)
    return parsed


def refuse_unknown(parsed: Body) -> None:
    for pointer, field, value in _unknown(parsed, ""):
        if value is None or field in IGNORED or _asks_nothing(parsed, field, value):
            continue
        raise UnsupportedParameter(f"the parameter {field!r} is not supported here", param=pointer)


def _asks_nothing(parsed: Body, field: str, value: Any) -> bool:
    no_request = NO_REQUEST_IN_CHAT if isinstance(parsed, ChatBody) else NO_REQUEST
    return any(type(value) is type(harmless) and value == harmless for harmless in no_request.get(field, ()))


def _unknown(value: Any, pointer: str) -> Iterator[tuple[str, str, Any]]:
    """A list holds models only, or none: one of millions of token ids is not walked through."""
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for position, item in enumerate(value):
            yield from _unknown(item, f"{pointer}/{position}")
    if isinstance(value, BaseModel):
        for field, item in (value.model_extra or {}).items():
            yield pointer + json_pointer([field]), field, item
        for field, info in type(value).model_fields.items():
            yield from _unknown(getattr(value, field), f"{pointer}/{info.alias or field}")


def _first_mistake(error: ValidationError) -> InvalidRequest:
    mistake = error.errors(include_url=False, include_input=False)[0]
    kind, message = mistake["type"], mistake["msg"]
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {message.partition(': ')[2]}")
    pointer = json_pointer(_path_in_body(mistake["loc"]))
    return InvalidRequest(_MESSAGES.get(kind, message[:1].lower() + message[1:]), param=pointer or None)


def _tool_use(error: ValidationError, body: bytes) -> UnsupportedParameter | None:
    """What to say of a message that is malformed only in the eyes of a server without tools: a tool's result, or a call without text."""
    match error.errors(include_url=False, include_input=False)[0]["loc"]:
        case ("messages", int(position), *_):
            message = pydantic_core.from_json(body)["messages"][position]
        case _:
            return None
    if not isinstance(message, dict):
        return None
    field = "role" if message.get("role") in ("tool", "function") else next((name for name in _TOOL_CALLS if message.get(name)), None)
    if field is None:
        return None
    return UnsupportedParameter("tool calling is not supported here", param=json_pointer(["messages", position, field]))


def _path_in_body(location: tuple[int | str, ...]) -> list[int | str]:
    """pydantic's location without the names it gives to members of unions and to keys."""
    steps = list(location)
    if steps[:1] == ["response_format"] and len(steps) > 1:
        del steps[1]
    return [step for step in steps if not (isinstance(step, str) and (step.startswith("<") or step == "[key]"))]
