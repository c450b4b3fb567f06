"""peft's own functions decide what is right: which rank, which alpha, which modules."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key

from loramux.adapters.peft_config import LoraConfig, read_config, read_keys

MODULES = [f"model.layers.{layer}.{name}" for layer in (0, 1, 10, 11) for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")]

PATTERNS = st.sampled_from(
    [
        "q_proj",
        "proj",
        "_proj",
        ".*_proj",
        "self_attn.q_proj",
        "layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        r"layers\.1\..*",
        r"layers\.1.*",
        r".*\.(0|10)\..*",
        "^model.layers.0.mlp.up_proj",
        r"[a-z_]+\.[qk]_proj",
        "q_proj|k_proj",
        "1.self_attn.q_proj",
        "",
    ]
)
NAMES = st.lists(st.sampled_from(["q_proj", "k_proj", "up_proj", "self_attn.q_proj", "proj", "1.self_attn.k_proj", *MODULES]), max_size=3)


def read(keys: dict[str, Any]) -> LoraConfig:
    return read_config(read_keys(json.dumps(keys).encode()))


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(PATTERNS, st.integers(1, 64), max_size=4), st.dictionaries(PATTERNS, st.integers(1, 64), max_size=4), st.booleans())
def test_patterns(ranks: dict[str, int], alphas: dict[str, int], use_rslora: bool) -> None:
    config = read({"r": 8, "lora_alpha": 5, "use_rslora": use_rslora, "rank_pattern": ranks, "alpha_pattern": alphas})
    for module in MODULES:
        rank = ranks.get(get_pattern_key(ranks.keys(), module), 8)
        alpha = alphas.get(get_pattern_key(alphas.keys(), module), 5)
        assert config.rank_of(module) == rank
        assert config.scale_of(module) == alpha / (rank**0.5 if use_rslora else rank)


@settings(deadline=None, max_examples=200)
@given(
    st.one_of(PATTERNS.filter(bool), NAMES.filter(bool)),
    st.one_of(st.none(), PATTERNS, NAMES),
    st.one_of(st.none(), st.integers(0, 11), st.lists(st.integers(0, 11), max_size=3)),
    st.one_of(st.none(), st.sampled_from(["layers", "h", "", "lay.*"]), st.lists(st.sampled_from(["layers", "h", "blocks"]), max_size=2)),
)
def test_targets(target: Any, exclude: Any, layers: Any, layers_pattern: Any) -> None:
    keys = {"target_modules": target, "exclude_modules": exclude, "layers_to_transform": layers, "layers_pattern": layers_pattern}
    config = read(keys)
    for module in MODULES:
        found = check_target_module_exists(SimpleNamespace(**keys, target_parameters=None), module)
        assert config.targets(module) is (bool(found) and not isinstance(found, _ExcludedModule)), module
