"""From a constraint to EBNF. Runs in a compile worker: what it reads is the client's."""

from __future__ import annotations

import msgspec

from loramux.errors import InvalidRequest, UnsupportedSchema
from loramux.grammar.coverage import refusals
from loramux.grammar.ebnf import any_of, json_rules, literal
from loramux.grammar.limits import MAX_ENUM_VALUES, MAX_PATTERN_BYTES, check_text, parse_json
from loramux.grammar.regex import RegexUnsupported, parse, whole
from loramux.grammar.regex_form import to_grammar_body
from loramux.grammar.schema_grammar import lower
from loramux.grammar.types import Constraint


def to_grammar(constraint: Constraint) -> str:
    """EBNF for xgrammar, rule `root`. Raises `InvalidRequest`, `UnsupportedSchema`, `GrammarTooComplex`."""
    check_text(constraint.text)
    match constraint.kind:
        case "json_schema":
            return _schema(constraint.text)
        case "json_object":
            rules = json_rules()
            rules.define("root", "object")
            return rules.text()
        case "regex":
            return f"root ::= {_regex(constraint.text)}\n"
        case "choice":
            return f"root ::= {_choice(constraint.text)}\n"
        case "grammar":
            return constraint.text


def _schema(text: str) -> str:
    schema = parse_json(text)
    found = refusals(schema)
    if found:
        listed = "; ".join(f"{refusal.pointer or '/'}: {refusal.reason}" for refusal in found[:5])
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        keywords = [msgspec.to_builtins(refusal) for refusal in found[:100]]
        raise UnsupportedSchema(f"the schema can't be enforced: {listed}{more}", details={"keywords": keywords})
    return lower(schema)


def _regex(text: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_PATTERN_BYTES:
        raise InvalidRequest(f"the regular expression is longer than {MAX_PATTERN_BYTES} bytes")
    try:
        return to_grammar_body(whole(parse(text), search=False), in_json=False)
    except RegexUnsupported as error:
        raise InvalidRequest(f"the regular expression can't be enforced: {error}") from None


def _choice(text: str) -> str:
    choices = parse_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest("choice must be a list of strings, none of them empty")
    if len(choices) > MAX_ENUM_VALUES or any("\0" in choice for choice in choices):
        raise InvalidRequest(f"choice takes up to {MAX_ENUM_VALUES} strings, without NUL")
    return any_of([literal(choice) for choice in dict.fromkeys(choices)])
