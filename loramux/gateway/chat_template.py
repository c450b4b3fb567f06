"""A checkpoint's chat template: jinja2 in a sandbox, with the settings, filters and globals that transformers gives it.

Templates are the operator's, messages are the client's: the sandbox is for the first, `InvalidRequest` for the second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from loramux.errors import InvalidRequest, StartupFailed

_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What a template can raise on messages it was not written for."""


class ChatTemplate:
    """Renders messages to prompt text. Raises `StartupFailed` on construction if the template does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise StartupFailed(f"the checkpoint's chat template does not compile: line {error.lineno}: {error.message}") from error
        self.literal_text = "\0".join(_literals(tree))
        """Everything the template writes by itself, its pieces divided by NUL."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool) -> str:
        """Keys of a message whose value is None are left out, as transformers does. Raises `InvalidRequest`."""
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=present, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(f"the model's chat template refused these messages: {error}", param="/messages") from error


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_TemplateNamespace)
    return environment


def _literals(tree: nodes.Template) -> list[str]:
    written = [node.data for node in tree.find_all(nodes.TemplateData)]
    return written + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what training learns from; a prompt only needs the body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _TemplateNamespace(Namespace):
    """`namespace()` without underscore names, through which a template could reach the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`, so that `namespace(self=...)` works
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
