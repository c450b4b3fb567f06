"""A JSON Schema, accepted by `coverage.py`, as EBNF: one rule per subschema, over the rules of `JSON_RULES`.

Keys come in the schema's order, then those that only `additionalProperties` speaks of. Values are spelled one way where JSON has
several: an integer without `.0`, a bounded number without an exponent, a fixed string with the escapes it needs.
"""

from __future__ import annotations

import json
from typing import Any

from loramux.errors import GrammarTooComplex
from loramux.grammar.coverage import MAX_STATES, TYPE_KEYWORDS, at_pointer, escape_pointer, resolve, schema_types, string_expression
from loramux.grammar.ebnf import (
    EVERY_CHARACTER,
    Ranges,
    RuleTable,
    any_of,
    character_class,
    escapes_in_json,
    json_rules,
    json_spelling,
    literal,
    plain_in_json,
    subtract,
    union,
)
from loramux.grammar.number_range import integer_range, multiples_in_range, number_range
from loramux.grammar.regex_form import to_grammar_body
from loramux.grammar.schema_values import integer_bounds, number_bounds, values_of_type
from loramux.grammar.string_length import StringLengths


def lower(schema: Any) -> str:
    """EBNF whose `root` matches the JSON texts of the schema's values. The schema has no refusals."""
    return _Lowering(schema).run()


def json_literal(value: Any) -> str:
    """EBNF of one JSON value, whitespace free between its tokens."""
    if isinstance(value, dict):
        members = [f"{literal(_quoted(key))} colon {json_literal(item)} ws" for key, item in value.items()]
        return " ".join(['"{" ws', " comma ".join(members), '"}"'])
    if isinstance(value, list):
        return " ".join(['"[" ws', " comma ".join(f"{json_literal(item)} ws" for item in value), '"]"'])
    return literal(_quoted(value))


def _quoted(value: Any) -> str:
    if isinstance(value, str):
        return '"' + "".join(json_spelling(ord(character)) for character in value) + '"'
    return json.dumps(value)


def repetition(item: str, minimum: int, maximum: int | None) -> str:
    if maximum == 0:
        return '""'
    return f"({item}){{{minimum},{'' if maximum is None else maximum}}}"


class _Lowering:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._rules = json_rules()
        self._lengths = StringLengths(self._rules)
        self._names: dict[str, str] = {}
        self._pending: list[str] = []

    def run(self) -> str:
        self._rules.define("root", self._rule(""))
        while self._pending:
            pointer = self._pending.pop()
            self._rules.define(self._names[pointer], self._body(pointer, at_pointer(self._root, pointer)))
        return self._rules.text()

    def _rule(self, pointer: str, *tokens: str | int) -> str:
        """The name of the rule for the subschema there, to be written if it is not yet."""
        pointer += "".join(f"/{escape_pointer(str(token))}" for token in tokens)
        if pointer not in self._names:
            self._names[pointer] = f"schema_{len(self._names)}"
            self._pending.append(pointer)
        return self._names[pointer]

    def _body(self, pointer: str, schema: Any) -> str:
        if schema is True:
            return "any"
        if "$ref" in schema:
            target = resolve(self._root, schema["$ref"])
            assert target is not None
            return self._rule(target)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            texts = [json_literal(value) for value in values_of_type(values, schema_types(schema))]
            return any_of(list(dict.fromkeys(texts)))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return any_of([self._rule(pointer, keyword, index) for index, branch in enumerate(schema[keyword]) if branch is not False])
        types = schema_types(schema)
        return any_of([self._of_type(pointer, schema, one) for one in types])

    def _of_type(self, pointer: str, schema: dict[str, Any], one: str) -> str:
        if not any(keyword in schema for keyword in TYPE_KEYWORDS[one]):
            return one
        if one == "string":
            return self._string(schema)
        if one == "integer":
            return self._integer(schema)
        if one == "number":
            low, high = number_bounds(schema)
            return number_range(low, high) or '""'
        return self._array(pointer, schema) if one == "array" else self._object(pointer, schema)

    def _string(self, schema: dict[str, Any]) -> str:
        expression = string_expression(schema)
        if expression is not None:
            return rf'"\"" {to_grammar_body(expression, in_json=True)} "\""'
        low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
        return self._lengths.body(low, None if high is None else int(high))

    def _integer(self, schema: dict[str, Any]) -> str:
        low, high = integer_bounds(schema)
        step = int(schema.get("multipleOf", 1))
        if step == 1:
            return integer_range(low, high)
        if low is not None and high is not None:
            return any_of([literal(str(value)) for value in multiples_in_range(step, low, high)])
        return self._multiples(step)

    def _multiples(self, step: int) -> str:
        """Digits read from the left, one rule per remainder."""
        names = [self._rules.fresh("remainder") for _ in range(step)]
        for remainder, name in enumerate(names):
            steps = [f'"{digit}" {names[(remainder * 10 + digit) % step]}' for digit in range(10)]
            self._rules.define(name, " | ".join((['""'] if remainder == 0 else []) + steps))
        starts = [f'"{digit}" {names[digit % step]}' for digit in range(1, 10)]
        return any_of(['"0"', f'"-"? {any_of(starts)}'])

    def _array(self, pointer: str, schema: dict[str, Any]) -> str:
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        high = None if high is None else int(high)
        prefix = [self._rule(pointer, "prefixItems", index) for index in range(len(schema.get("prefixItems", ())))]
        rest = schema.get("items", True)
        item = None if rest is False else self._rule(pointer, "items") if isinstance(rest, dict) else "any"
        if high is not None and high < len(prefix):
            prefix, item = prefix[:high], None
        body = self._items(prefix, item, low, high)
        return f'"[" ws {body} "]"'

    def _items(self, prefix: list[str], item: str | None, low: int, high: int | None) -> str:
        """What is between the brackets, from the last place to the first."""
        tail = '""'
        if item is not None:
            least, most = max(0, low - len(prefix)), None if high is None else high - len(prefix)
            if not prefix:
                return self._run(f"{item} ws", least, most)
            tail = repetition(f"comma {item} ws", least, most)
        for index in range(len(prefix) - 1, -1, -1):
            here = f"{'comma ' if index else ''}{prefix[index]} ws {tail}"
            tail = self._rules.define(self._rules.fresh("items"), here if index < low else f'"" | {here}')
        return tail

    def _run(self, item: str, least: int, most: int | None) -> str:
        """`least` to `most` items with commas between."""
        if most == 0:
            return '""'
        some = f"{item} {repetition(f'comma {item}', max(0, least - 1), None if most is None else most - 1)}"
        return some if least else f"({some})?"

    def _object(self, pointer: str, schema: dict[str, Any]) -> str:
        return _ObjectLowering(self._rules, schema, lambda *tokens: self._rule(pointer, *tokens)).run()


class _ObjectLowering:
    """One rule per (property, number of properties before it): what may follow from there."""

    def __init__(self, rules: RuleTable, schema: dict[str, Any], rule: Any) -> None:
        self._rules = rules
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
        self._required = set(schema.get("required", []))
        self._extra = None if extra is False else rule("additionalProperties") if isinstance(extra, dict) else "any"
        self._values = {name: rule("properties", name) for name, value in properties.items() if value is not False}
        self._values.update({name: self._extra or "any" for name in schema.get("required", []) if name not in self._values})
        self._reserved = {**self._values, **properties}
        self._names = list(self._values)
        self._low = int(schema.get("minProperties", 0))
        high = schema.get("maxProperties")
        self._high = None if high is None else int(high)
        self._enough = max(1, self._low) if self._high is None else self._high
        """Counts from here on need not be told apart."""

    def run(self) -> str:
        if self._extra is not None and not self._reserved:
            return f'"{{" ws {self._extras("string", 0)} "}}"'
        start = self._states()
        assert start is not None
        return f'"{{" ws {start} "}}"'

    def _states(self) -> str | None:
        key = self._other_key() if self._extra is not None else ""
        following = {count: self._end(key, count) for count in range(self._enough + 1)}
        for name in reversed(self._names):
            following = {count: self._place(name, count, following) for count in range(self._enough + 1)}
        return following[0]

    def _place(self, name: str, count: int, following: dict[int, str | None]) -> str | None:
        choices = []
        if following[count] is not None and name not in self._required:
            choices.append(following[count])
        after = following[min(count + 1, self._enough)]
        if count != self._high and after is not None:
            choices.append(f"{'comma ' if count else ''}{literal(_quoted(name))} colon {self._values[name]} ws {after}")
        if not choices:
            return None
        return self._rules.define(self._rules.fresh("members"), " | ".join(choice for choice in choices if choice))

    def _end(self, key: str, count: int) -> str | None:
        if self._extra is None:
            return '""' if count >= self._low else None
        return self._rules.define(self._rules.fresh("extra"), self._extras(key, count))

    def _extras(self, key: str, count: int) -> str:
        least = max(0, self._low - count)
        most = None if self._high is None else self._high - count
        member = f"{key} colon {self._extra} ws"
        if count:
            return repetition(f"comma {member}", least, most)
        if most == 0:
            return '""'
        some = f"{member} {repetition(f'comma {member}', max(0, least - 1), None if most is None else most - 1)}"
        return some if least else f"({some})?"

    def _other_key(self) -> str:
        """A rule for the keys that are none of the reserved names, however an escape might spell one: while what is written is the
        beginning of a reserved name, each character has one spelling."""
        trie: dict[str, Any] = {}
        for name in self._reserved:
            node = trie
            for character in name:
                node = node.setdefault(character, {})
            node[""] = {}
        return self._rules.define(self._rules.fresh("key"), rf'"\"" {self._key_rule(trie)}')

    def _key_rule(self, trie: dict[str, Any]) -> str:
        """Rules for all nodes, children before their parents, without recursion."""
        order: list[dict[str, Any]] = [trie]
        for node in order:
            order.extend(child for character, child in node.items() if character)
        if len(order) > 4 * MAX_STATES:
            raise GrammarTooComplex("an object that allows other properties has too many or too long names of its own")
        self._rules.define("key_escape", _escapes(EVERY_CHARACTER))
        names: dict[int, str] = {}
        for node in reversed(order):
            names[id(node)] = self._rules.define(self._rules.fresh("key"), _key_choices(node, names))
        return names[id(trie)]


def _escapes(ranges: Ranges) -> str:
    return any_of(escapes_in_json(ranges))


def _key_choices(node: dict[str, Any], names: dict[int, str]) -> str:
    inside = [character for character in node if character]
    outside = subtract(EVERY_CHARACTER, union((ord(character), ord(character)) for character in inside))
    escapes = "key_escape" if all(character == json_spelling(ord(character)) for character in inside) else _escapes(outside)
    choices = [] if "" in node else [r'"\""']
    choices += [f"{character_class(plain_in_json(outside))} string_rest", f"{escapes} string_rest"]
    choices += [f"{literal(json_spelling(ord(character)))} {names[id(node[character])]}" for character in inside]
    return " | ".join(choices)
