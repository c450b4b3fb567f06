"""The flags of `loramux serve`, made from the fields of `Settings`, so that no setting lacks its flag."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from loramux.gateway.settings import Settings


def with_settings_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `config` and `**flags` one option per setting; only those given reach it."""

    def run(config: Path | None = None, **values: Any) -> None:
        command(config, {name: value for name, value in values.items() if value not in (None, [])})

    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG)
    parameters = [config, *(_parameter(name) for name in Settings.model_fields)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


_CONFIG = Annotated[Path | None, typer.Option("--config", envvar="LORAMUX_CONFIG", help="A TOML file with these settings.")]


def _parameter(name: str) -> inspect.Parameter:
    field = Settings.model_fields[name]
    flag = "--" + name.replace("_", "-")
    option = typer.Option(flag, help=_help(name), show_default=False)
    kind = _plain(field.annotation)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _plain(annotation: Any) -> Any:
    """The type that the command line parses: without bounds, None, or a choice, which Settings checks."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return _plain(next(arg for arg in get_args(annotation) if arg is not type(None)))
    return str if origin is Literal else annotation


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    default = field.default
    shown = "" if field.is_required() or default in (None, [], False) or field.default_factory else f" [default: {default}]"
    return f"{field.description}{shown}"
