"""Validation of a PEFT LoRA adapter, as `save_pretrained` writes it, against a base."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from loramux.adapters.added_tokens import unknown_tokens
from loramux.adapters.binding import Binding, BoundModule, bind
from loramux.adapters.identity import digest_of
from loramux.adapters.peft_config import LoraConfig, read_config, read_keys
from loramux.adapters.peft_keys import judge_keys
from loramux.adapters.peft_tensors import AdapterTensor, Grouping, group_tensors, largest_magnitude, read_tensors
from loramux.adapters.saved_weights import replaced_weights
from loramux.adapters.types import BaseDescription, KeyVerdict, RegistrationReport
from loramux.errors import AdapterInvalid

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"

_MAX_LISTED = 50
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}


class _Contents(NamedTuple):
    config: LoraConfig
    tensors: tuple[AdapterTensor, ...]
    grouping: Grouping
    binding: Binding


def validate(config: bytes, tensors: bytes, base: BaseDescription, *, added_tokens: bytes | None = None) -> RegistrationReport:
    """What registering these files would apply, ignore and reject. Whatever is wrong is in the report's `errors`; nothing is raised.

    `added_tokens` is the file of that name, if the adapter has one.
    """
    keys: dict[str, Any] = {}
    try:
        keys = read_keys(config)
        token_errors = () if added_tokens is None else unknown_tokens(added_tokens, base)
        return _report(keys, _read(keys, tensors, base), base, token_errors)
    except AdapterInvalid as error:
        return _unreadable(judge_keys(keys), error)


def raise_if_invalid(report: RegistrationReport) -> None:
    """Raises `AdapterInvalid` with the report in its details if the report holds errors."""
    if report.errors:
        more = f" (and {len(report.errors) - 1} more)" if len(report.errors) > 1 else ""
        raise AdapterInvalid(report.errors[0] + more, details={"report": msgspec.to_builtins(report)})


def _read(keys: Mapping[str, Any], tensors: bytes, base: BaseDescription) -> _Contents:
    config = read_config(keys)
    found = read_tensors(tensors)
    grouping = group_tensors(found)
    return _Contents(config, found, grouping, bind(config, grouping.modules, base.modules))


def _report(keys: Mapping[str, Any], contents: _Contents, base: BaseDescription, token_errors: Iterable[str]) -> RegistrationReport:
    verdicts = judge_keys(keys)
    bound = contents.binding.modules
    saved = contents.grouping.saved_weights
    replaced = list(replaced_weights(saved, base))
    rank = max((module.rank for module in bound), default=0)
    return RegistrationReport(
        digest=digest_of(contents.config, contents.tensors),
        tensors_matched=contents.binding.num_tensors + len(saved) - len(replaced),
        tensors_total=len(contents.tensors),
        modules=tuple(module.module for module in bound),
        rank=rank,
        ranks={module.module: module.rank for module in bound if module.rank != rank},
        scale=contents.config.default_scale,
        num_bytes=sum(len(tensor.data) for tensor in contents.tensors if not tensor.is_saved_weight),
        keys=verdicts,
        warnings=_listed([*_name_warnings(keys, base), *_effect_warnings(contents, base)]),
        errors=_listed([*_rejections(verdicts), *token_errors, *replaced, *_tensor_errors(contents, base)]),
    )


def _unreadable(verdicts: tuple[KeyVerdict, ...], error: AdapterInvalid) -> RegistrationReport:
    return RegistrationReport(
        digest="",
        tensors_matched=0,
        tensors_total=0,
        modules=(),
        rank=0,
        ranks={},
        scale=0.0,
        num_bytes=0,
        keys=verdicts,
        errors=_listed([error.message, *_rejections(verdicts)]),
    )


def _rejections(verdicts: Iterable[KeyVerdict]) -> list[str]:
    return [f"{CONFIG_FILE}: {verdict.key} is rejected: {verdict.reason}" for verdict in verdicts if verdict.verdict == "rejected"]


def _tensor_errors(contents: _Contents, base: BaseDescription) -> Iterable[str]:
    yield from contents.grouping.errors
    yield from contents.binding.errors
    if not any(module.rank for module in contents.binding.modules):
        yield "no tensor matches a module of the base: there is no A with its B"
    for module in contents.binding.modules:
        yield from _value_errors(module, base)


def _value_errors(module: BoundModule, base: BaseDescription) -> Iterable[str]:
    if module.rank > base.max_lora_rank:
        yield f"{module.module}: rank {module.rank} is over the server's limit of {base.max_lora_rank}"
    limit = _LARGEST.get(base.dtype, math.inf)
    for tensor in module.tensors:
        magnitude = largest_magnitude(tensor) * (abs(module.scale) if tensor in (module.b, module.lora_bias) else 1.0)
        if not math.isfinite(magnitude):
            yield f"{tensor.name}: it holds NaN or infinite values"
        elif magnitude > limit:
            yield f"{tensor.name}: {magnitude:g} is more than {base.dtype} can hold"


def _name_warnings(keys: Mapping[str, Any], base: BaseDescription) -> Iterable[str]:
    trained_on = keys.get("base_model_name_or_path")
    if trained_on and _last_part(str(trained_on)) != _last_part(base.name):
        yield f"the adapter was trained on {str(trained_on)[:200]!r}, the server runs {base.name!r}"


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


def _effect_warnings(contents: _Contents, base: BaseDescription) -> Iterable[str]:
    bound = contents.binding.modules
    if bound and not any(map(_has_effect, bound)):
        yield "every B or scale is zero: the adapter changes nothing"
    having = {tensors.module for tensors in contents.grouping.modules}
    without = [name for name in base.modules if name not in having and contents.config.targets(name)]
    if without and contents.config.target_modules not in (None, "all-linear"):
        yield f"{len(without)} targeted modules have no tensors and stay as they are, the first is {without[0]}"


def _has_effect(module: BoundModule) -> bool:
    if module.magnitude or module.bias:
        return True
    return module.scale != 0 and any(largest_magnitude(tensor) > 0 for tensor in (module.b, module.lora_bias) if tensor)


def _listed(items: list[str]) -> tuple[str, ...]:
    if len(items) <= _MAX_LISTED:
        return tuple(items)
    return (*items[:_MAX_LISTED], f"and {len(items) - _MAX_LISTED} more")
