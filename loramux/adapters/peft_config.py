"""The keys of an `adapter_config.json` that change inference, read as peft reads them.

Patterns are regular expressions from a stranger's file, so RE2 matches them, in linear time; what only a backtracking matcher can
do (lookaround, back-references) is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import re2

from loramux.errors import AdapterInvalid

_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERN_CHARS = 1024
_MAX_PATTERNS = 4096
_MAX_RANK = 1 << 20
"""Far over any server's limit, which the report tells; a whole number has no bound in JSON, but a scale is made of it."""
_MAX_ALPHA = 1e9
_NAMED_ONLY = frozenset({"embed_tokens", "lm_head"})
"""What peft leaves alone where no module is named."""
_DEFAULT_RANK = 8
_DEFAULT_ALPHA = 8

_Number = TypeVar("_Number", int, float)


def _quiet() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    return options


class _Patterns:
    """Compiled patterns, each compiled once."""

    def __init__(self) -> None:
        self._compiled: dict[str, re2._Regexp] = {}

    def match(self, pattern: str, text: str) -> re2._Match | None:
        """`re.match`. Raises `AdapterInvalid` for a pattern that is malformed or needs backtracking."""
        return self._compile(pattern).match(text)

    def fullmatch(self, pattern: str, text: str) -> re2._Match | None:
        return self._compile(pattern).fullmatch(text)

    def _compile(self, pattern: str) -> re2._Regexp:
        if pattern not in self._compiled:
            try:
                self._compiled[pattern] = re2.compile(pattern, _quiet())
            except re2.error as error:
                reason = error.args[0].decode(errors="replace")
                raise AdapterInvalid(f"adapter_config.json: the pattern {pattern[:80]!r} can't be used: {reason}") from None
        return self._compiled[pattern]


@dataclass(frozen=True)
class LoraConfig:
    """Fields as in peft's class of the same name; absent ones hold peft's defaults."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    use_dora: bool
    lora_bias: bool
    bias: str
    """none, lora_only or all: which of the base's biases the file may replace."""
    _patterns: _Patterns = field(default_factory=_Patterns, compare=False, repr=False)

    def rank_of(self, *names: str) -> int:
        """Of a module, by its name or names: the normal one, and those that its file has for it."""
        return self._by_pattern(self.rank_pattern, names, self.rank)

    def scale_of(self, *names: str) -> float:
        return self._scale(self._by_pattern(self.alpha_pattern, names, self.alpha), self.rank_of(*names))

    @property
    def default_scale(self) -> float:
        return self._scale(self.alpha, self.rank)

    def targets(self, *names: str) -> bool:
        """Whether peft would put an adapter on the module that has these names: targeted by one of them, and excluded by none.

        The rule is that of `tuners_utils.check_target_module_exists`.
        """
        return not any(self._named(self.exclude_modules, name) for name in names) and any(map(self._targets, names))

    def _targets(self, name: str) -> bool:
        if self.target_modules is None or self.target_modules == "all-linear":
            return name.rpartition(".")[2] not in _NAMED_ONLY
        if not self._named(self.target_modules, name):
            return False
        if isinstance(self.target_modules, str) or name in self.target_modules or not self.layers_to_transform:
            return True
        return self._layer_of(name) in self.layers_to_transform

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _by_pattern(self, pattern_values: Mapping[str, _Number], modules: Sequence[str], default: _Number) -> _Number:
        """peft's `get_pattern_key`: the first key that matches a whole tail of the name, from a dot on."""
        for pattern, value in pattern_values.items():
            if any(self._patterns.match(rf"(.*\.)?({pattern})$", module) for module in modules):
                return value
        return default

    def _named(self, names: str | tuple[str, ...], module: str) -> bool:
        if isinstance(names, str):
            return bool(names) and self._patterns.fullmatch(names, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _layer_of(self, module: str) -> int | None:
        for pattern in self.layers_pattern or (r"[^.]*",):
            prefix = r"(?:^|.*?\.)" if self.layers_pattern else r".*?\."
            match = self._patterns.match(rf"{prefix}{pattern}\.(?P<idx>\d+)\.", module)
            if match and (index := match.group("idx")) is not None:  # an alternative in the pattern may match without it
                return int(index)
        return None


def read_keys(config: bytes) -> dict[str, Any]:
    """The keys of an adapter_config.json. Raises `AdapterInvalid` if it is not a JSON object."""
    if len(config) > _MAX_CONFIG_BYTES:
        raise AdapterInvalid(f"adapter_config.json has {len(config)} bytes, more than {_MAX_CONFIG_BYTES}")
    try:
        return msgspec.json.decode(config, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterInvalid(f"adapter_config.json is not a JSON object: {error}") from None


def read_config(keys: Mapping[str, Any]) -> LoraConfig:
    """The configuration from the keys of its file. Raises `AdapterInvalid` naming the key that has the wrong type or range."""
    layers = keys.get("layers_to_transform")
    if keys.get("lora_bias") and keys.get("use_dora"):
        raise AdapterInvalid("adapter_config.json: lora_bias and use_dora exclude each other, in peft too")
    return LoraConfig(
        rank=_positive("r", keys.get("r", _DEFAULT_RANK)),
        alpha=_number("lora_alpha", keys.get("lora_alpha", _DEFAULT_ALPHA)),
        use_rslora=_typed(keys, "use_rslora", bool, False),
        rank_pattern={key: _positive(f"rank_pattern[{key!r}]", rank) for key, rank in _pattern_items(keys, "rank_pattern")},
        alpha_pattern={key: _number(f"alpha_pattern[{key!r}]", value) for key, value in _pattern_items(keys, "alpha_pattern")},
        target_modules=_names(keys, "target_modules"),
        exclude_modules=_names(keys, "exclude_modules") or (),
        layers_to_transform=None if layers is None else frozenset(_layer_indexes(layers)),
        layers_pattern=_as_tuple(_names(keys, "layers_pattern")),
        use_dora=_typed(keys, "use_dora", bool, False),
        lora_bias=_typed(keys, "lora_bias", bool, False),
        bias=_typed(keys, "bias", str, "none"),
    )


def _wrong(key: str, value: object, expected: str) -> AdapterInvalid:
    return AdapterInvalid(f"adapter_config.json: {key} is {repr(value)[:80]}, it must be {expected}")


def _typed(keys: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = keys.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _wrong(key, value, f"a {kind.__name__}")
    return value


def _positive(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise _wrong(key, value, f"a whole number from 1 to {_MAX_RANK}")
    return value


def _number(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MAX_ALPHA:
        raise _wrong(key, value, f"a number below {_MAX_ALPHA:g}")
    return float(value)


def _pattern_items(keys: Mapping[str, Any], key: str) -> Iterable[tuple[str, Any]]:
    patterns: dict[str, Any] = _typed(keys, key, dict, {})
    if len(patterns) > _MAX_PATTERNS:
        raise AdapterInvalid(f"adapter_config.json: {key} has {len(patterns)} patterns, more than {_MAX_PATTERNS}")
    for pattern in patterns:
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise _wrong(key, pattern, f"made of patterns of at most {_MAX_PATTERN_CHARS} characters")
    return patterns.items()


def _names(keys: Mapping[str, Any], key: str) -> str | tuple[str, ...] | None:
    value = keys.get(key)
    if value is None or isinstance(value, str):
        if value is not None and len(value) > _MAX_PATTERN_CHARS:
            raise _wrong(key, value, f"at most {_MAX_PATTERN_CHARS} characters long")
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong(key, value, "a string or a list of strings")
    return tuple(value)


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if isinstance(names, str):
        return (names,) if names else ()
    return names or ()


def _layer_indexes(value: object) -> Iterable[int]:
    indexes: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in indexes):
        raise _wrong("layers_to_transform", value, "a number or a list of numbers")
    return indexes
