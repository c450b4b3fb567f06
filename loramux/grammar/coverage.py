"""Which schemas are enforced in full: every keyword is on the list below, in a place and company where it is, or it is refused.

What the keywords mean is JSON Schema 2020-12, formats asserted. `schema_grammar.py` writes the grammar of what is accepted here, and
`tests/grammar/test_coverage.py` holds both against python-jsonschema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from loramux.errors import GrammarTooComplex
from loramux.grammar.disjoint import are_disjoint
from loramux.grammar.formats import FORMATS
from loramux.grammar.keyword_values import VALUE_CHECKS
from loramux.grammar.limits import MAX_REFERENCE_CHAIN, check_size
from loramux.grammar.number_range import MAX_DIGITS, as_decimal, num_digits
from loramux.grammar.regex import Node, RegexUnsupported, parse, to_ebnf, whole, width
from loramux.grammar.schema_values import (
    EVERY_TYPE,
    integer_bounds,
    is_empty_number_range,
    values_of_type,
)
from loramux.grammar.types import KeywordRefusal

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
    | {"$defs", "definitions", "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "nullable"}
)
"""Change nothing about what is valid. `discriminator` and `nullable` are OpenAPI's words, which JSON Schema does not know."""

TYPE_KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties", "propertyNames"),
    "boolean": (),
    "null": (),
}
"""What each type can be asked; a keyword of another type than those a schema names holds nothing back and is passed over."""

_OF_TYPES = frozenset(keyword for keywords in TYPE_KEYWORDS.values() for keyword in keywords)
FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""The first of these that a schema has decides it; any other assertion beside it is refused."""

KNOWN = ANNOTATIONS | _OF_TYPES | frozenset(FORMS) | {"type"}

MAX_STATES = 5_000
"""Of one object with minProperties or maxProperties: properties times counts."""
MAX_MULTIPLES = 1_000
MAX_MODULUS = 64


def escape_pointer(token: str) -> str:
    return token.replace("~", "~0").replace("/", "~1")


def resolve(root: Any, reference: str) -> str | None:
    """The JSON pointer that a `$ref` into the same document leads to, None where there is nothing or it leads elsewhere."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    pointer = unquote(reference[1:])
    try:
        at_pointer(root, pointer)
    except (KeyError, IndexError, ValueError, TypeError):
        return None
    return pointer


def at_pointer(root: Any, pointer: str) -> Any:
    value = root
    for token in pointer.split("/")[1:]:
        token = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            if not (token.isascii() and token.isdigit()) or (len(token) > 1 and token[0] == "0"):
                raise KeyError(token)
            value = value[int(token)]
        else:
            value = value[token]
    return value


def schema_types(schema: dict[str, Any]) -> tuple[str, ...]:
    """The types a schema names, all of them where it names none; `integer` is dropped beside `number`."""
    named = schema.get("type", EVERY_TYPE)
    types = (named,) if isinstance(named, str) else tuple(dict.fromkeys(named))
    return tuple(one for one in types if one != "integer" or "number" not in types)


class _Edges(NamedTuple):
    """How a schema depends on others, by pointer."""

    needed: tuple[str, ...] = ()
    """Each must have a finite value for this one to have one."""
    alternatives: tuple[str, ...] = ()
    """One of these must, if there are any."""
    same_value: tuple[str, ...] = ()
    """Those that look at the very value that this one looks at."""

    def are_met(self, productive: set[str]) -> bool:
        return productive.issuperset(self.needed) and (not self.alternatives or not productive.isdisjoint(self.alternatives))


class _Walk:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._pending = [""]
        self._seen = {""}
        self.edges: dict[str, _Edges] = {}
        self.refusals: list[KeywordRefusal] = []

    def run(self) -> list[KeywordRefusal]:
        while self._pending:
            pointer = self._pending.pop()
            self.edges[pointer] = self._visit(pointer, at_pointer(self._root, pointer))
        if not self.refusals:
            self._check_recursion()
        return self.refusals

    def _refuse(self, pointer: str, keyword: str, reason: str) -> None:
        self.refusals.append(KeywordRefusal(f"{pointer}/{escape_pointer(keyword)}" if keyword else pointer, keyword, reason))

    def _child(self, pointer: str, *tokens: str | int) -> str:
        child = pointer + "".join(f"/{escape_pointer(str(token))}" for token in tokens)
        return self._follow(child)

    def _follow(self, pointer: str) -> str:
        if pointer not in self._seen:
            self._seen.add(pointer)
            self._pending.append(pointer)
        return pointer

    def _visit(self, pointer: str, schema: Any) -> _Edges:
        if schema is True:
            return _Edges()
        if schema is False:
            self._refuse(pointer, "", "allows no value here")
            return _Edges()
        if not isinstance(schema, dict):
            self._refuse(pointer, "", "a schema must be an object or a boolean")
            return _Edges()
        if not self._check_keywords(pointer, schema):
            return _Edges()
        form = next((form for form in FORMS if form in schema), None)
        if form is None:
            return self._visit_types(pointer, schema)
        beside = {"type"} if form in ("const", "enum") else set()
        for keyword in schema:
            if keyword not in ANNOTATIONS and keyword != form and keyword not in beside and not keyword.startswith(("x-", "$id")):
                self._refuse(pointer, keyword, f"is not enforced beside {form}")
        return _FORM_VISITS[form](self, pointer, schema)

    def _check_keywords(self, pointer: str, schema: dict[str, Any]) -> bool:
        before = len(self.refusals)
        for keyword, value in schema.items():
            if keyword in ("$id", "id") and pointer == "" and isinstance(value, str):
                continue
            if keyword not in KNOWN and not keyword.startswith("x-"):
                self._refuse(pointer, keyword, "is not enforced")
            elif keyword in VALUE_CHECKS and (complaint := VALUE_CHECKS[keyword](value)) is not None:
                self._refuse(pointer, keyword, complaint)
        return len(self.refusals) == before

    def _visit_reference(self, pointer: str, schema: dict[str, Any]) -> _Edges:
        target = resolve(self._root, schema["$ref"])
        if target is None:
            self._refuse(pointer, "$ref", "leads to nothing in this schema")
            return _Edges()
        return _Edges((self._follow(target),), same_value=(target,))

    def _visit_finite(self, pointer: str, schema: dict[str, Any]) -> _Edges:
        keyword = "const" if "const" in schema else "enum"
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        if not values_of_type(values, schema_types(schema)):
            self._refuse(pointer, keyword, "allows no value together with type" if "type" in schema else "allows no value")
        return _Edges()

    def _visit_choice(self, pointer: str, schema: dict[str, Any]) -> _Edges:
        keyword = "anyOf" if "anyOf" in schema else "oneOf"
        branches = [index for index, branch in enumerate(schema[keyword]) if branch is not False]
        if not branches:
            self._refuse(pointer, keyword, "allows no value")
        if keyword == "oneOf" and not are_disjoint([schema[keyword][index] for index in branches], self._dereference):
            self._refuse(pointer, keyword, "is enforced only where type, const, enum or a property tells the branches apart")
        children = tuple(self._child(pointer, keyword, index) for index in branches)
        return _Edges(alternatives=children, same_value=children)

    def _dereference(self, schema: Any) -> Any:
        for _ in range(MAX_REFERENCE_CHAIN):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            target = resolve(self._root, schema["$ref"])
            if target is None:
                return {}
            schema = at_pointer(self._root, target)
        return {}

    def _visit_all(self, pointer: str, schema: dict[str, Any]) -> _Edges:
        if len(schema["allOf"]) != 1:
            self._refuse(pointer, "allOf", "is enforced with a single branch only")
            return _Edges()
        child = self._child(pointer, "allOf", 0)
        return _Edges((child,), same_value=(child,))

    def _visit_types(self, pointer: str, schema: dict[str, Any]) -> _Edges:
        types = schema_types(schema)
        needed: list[str] = []
        for one in types:
            if one == "string":
                self._check_string(pointer, schema)
            elif one in ("integer", "number"):
                self._check_number(pointer, schema, one)
            elif one == "array":
                needed += self._visit_array(pointer, schema)
            elif one == "object":
                needed += self._visit_object(pointer, schema)
        return _Edges(tuple(needed) if types in (("array",), ("object",)) else ())

    def _check_string(self, pointer: str, schema: dict[str, Any]) -> None:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if high is not None and low > high:
            self._refuse(pointer, "minLength", "is greater than maxLength")
        if "pattern" in schema and "format" in schema:
            self._refuse(pointer, "format", "is not enforced beside pattern")
            return
        node = self._string_expression(pointer, schema)
        if node is None:
            return
        shortest, longest = width(node)
        keyword = "pattern" if "pattern" in schema else "format"
        if shortest < low:
            self._refuse(pointer, "minLength", f"is not enforced beside a {keyword} that allows shorter strings")
        if high is not None and (longest is None or longest > high):
            self._refuse(pointer, "maxLength", f"is not enforced beside a {keyword} that allows longer strings")

    def _string_expression(self, pointer: str, schema: dict[str, Any]) -> Node | None:
        try:
            node = string_expression(schema)
            if node is not None:
                to_ebnf(node, in_json=True)
            return node
        except RegexUnsupported as error:
            self._refuse(pointer, "pattern", f"is not enforced: {error}")
        except KeyError:
            self._refuse(pointer, "format", f"{schema['format']!r} is not enforced")
        return None

    def _check_number(self, pointer: str, schema: dict[str, Any], one: str) -> None:
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if keyword in schema and num_digits(as_decimal(schema[keyword])) > MAX_DIGITS:
                self._refuse(pointer, keyword, f"has more than {MAX_DIGITS} digits")
                return
        step = schema.get("multipleOf")
        if step is not None and (one == "number" or as_decimal(step) % 1 != 0):
            self._refuse(pointer, "multipleOf", "is enforced for integers only")
            return
        if one == "integer":
            self._check_integer(pointer, schema, None if step is None else int(step))
        elif is_empty_number_range(schema):
            self._refuse(pointer, "minimum" if "minimum" in schema else "exclusiveMinimum", "allows no value together with the upper bound")

    def _check_integer(self, pointer: str, schema: dict[str, Any], step: int | None) -> None:
        low, high = integer_bounds(schema)
        if low is not None and high is not None and low > high:
            self._refuse(pointer, "minimum" if "minimum" in schema else "exclusiveMinimum", "allows no value together with the upper bound")
        elif step is None or step == 1:
            return
        elif low is None and high is None:
            if step > MAX_MODULUS:
                self._refuse(pointer, "multipleOf", f"is enforced up to {MAX_MODULUS}, or between two bounds")
        elif low is None or high is None:
            self._refuse(pointer, "multipleOf", "is enforced with both bounds or with none")
        elif not 1 <= high // step + -low // step + 1 <= MAX_MULTIPLES:
            self._refuse(pointer, "multipleOf", f"is enforced where between 1 and {MAX_MULTIPLES} values are in bounds")

    def _visit_array(self, pointer: str, schema: dict[str, Any]) -> list[str]:
        if schema.get("uniqueItems", False):
            self._refuse(pointer, "uniqueItems", "is not enforced")
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high is not None and low > high:
            self._refuse(pointer, "minItems", "is greater than maxItems")
        prefix = [self._child(pointer, "prefixItems", index) for index in range(len(schema.get("prefixItems", ())))]
        rest = schema.get("items", True)
        if rest is False and low > len(prefix):
            self._refuse(pointer, "minItems", "is greater than the number of items allowed")
        needed = prefix[: int(low)]
        if isinstance(rest, dict):
            item = self._child(pointer, "items")
            needed += [item] if low > len(prefix) else []
        return needed

    def _visit_object(self, pointer: str, schema: dict[str, Any]) -> list[str]:
        for keyword in ("patternProperties", "propertyNames"):
            if schema.get(keyword, {}) not in ({}, True, {"type": "string"}):
                self._refuse(pointer, keyword, "is not enforced")
        properties, required, extra = schema.get("properties", {}), schema.get("required", []), schema.get("additionalProperties", True)
        for name in required:
            if properties.get(name, extra) is False:
                self._refuse(pointer, "required", f"asks for {name!r}, which is not allowed")
        self._check_counts(pointer, schema)
        children = {name: self._child(pointer, "properties", name) for name, value in properties.items() if value is not False}
        needed = [children[name] for name in required if name in children]
        if isinstance(extra, dict):
            child = self._child(pointer, "additionalProperties")
            must_have = any(name not in properties for name in required) or schema.get("minProperties", 0) > len(properties)
            needed += [child] if must_have else []
        return needed

    def _check_counts(self, pointer: str, schema: dict[str, Any]) -> None:
        low, high = schema.get("minProperties", 0), schema.get("maxProperties")
        required = len(set(schema.get("required", [])))
        names = {name for name, value in schema.get("properties", {}).items() if value is not False}
        is_open = schema.get("additionalProperties", True) is not False
        if high is not None and max(low, required) > high:
            self._refuse(pointer, "maxProperties", "allows fewer properties than there must be")
        if is_open and low > max(1, required):
            self._refuse(pointer, "minProperties", "is enforced above 1 only where additionalProperties is false")
        if not is_open and low > len(names):
            self._refuse(pointer, "minProperties", "is greater than the number of properties allowed")
        if (len(names) + 1) * max(low, high or 0) > MAX_STATES:
            raise GrammarTooComplex(f"minProperties or maxProperties at {pointer or '/'} over too many properties")

    def _check_recursion(self) -> None:
        for pointer in _unproductive(self.edges):
            self._refuse(pointer, "", "has no finite value: it contains itself without end")
        for pointer in _looping(self.edges):
            self._refuse(pointer, "", "refers to itself for the same value")


_FORM_VISITS: dict[str, Callable[[_Walk, str, dict[str, Any]], _Edges]] = {
    "$ref": _Walk._visit_reference,
    "const": _Walk._visit_finite,
    "enum": _Walk._visit_finite,
    "anyOf": _Walk._visit_choice,
    "oneOf": _Walk._visit_choice,
    "allOf": _Walk._visit_all,
}


def string_expression(schema: dict[str, Any]) -> Node | None:
    """What a string must match in whole, from `pattern` or `format`; None where it has neither. Raises `RegexUnsupported`, `KeyError`."""
    if "pattern" in schema:
        return whole(parse(schema["pattern"]), search=True)
    return parse(FORMATS[schema["format"]]) if "format" in schema else None


def _unproductive(edges: dict[str, _Edges]) -> list[str]:
    """Schemas that no finite value meets, by rounds: those whose needs are met join until none does."""
    productive: set[str] = set()
    while True:
        waiting = [pointer for pointer in edges if pointer not in productive]
        joining = [pointer for pointer in waiting if edges[pointer].are_met(productive)]
        if not joining:
            return waiting
        productive.update(joining)


def _looping(edges: dict[str, _Edges]) -> Iterator[str]:
    """Schemas that come back to themselves while looking at the same value."""
    done: set[str] = set()
    for start in edges:
        path: dict[str, Iterator[str]] = {start: iter(edges[start].same_value)} if start not in done else {}
        while path:
            pointer, children = next(reversed(path.items()))
            child = next(children, None)
            if child is None:
                done.add(pointer)
                del path[pointer]
            elif child in path:
                yield child
            elif child not in done:
                path[child] = iter(edges[child].same_value)
                if len(path) > MAX_REFERENCE_CHAIN:
                    raise GrammarTooComplex(f"a chain of more than {MAX_REFERENCE_CHAIN} references")


def refusals(schema: Any) -> list[KeywordRefusal]:
    """Every keyword that is malformed, can't be met, or is not enforced where it stands; none means that all are enforced.

    Raises `GrammarTooComplex` for a schema out of bounds.
    """
    check_size(schema)
    return _Walk(schema).run()
