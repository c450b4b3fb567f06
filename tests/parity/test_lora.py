"""Batches that mix the base and adapters, against peft one row at a time, to 1e-4 in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.parity.harness import greedy, logits
from tests.parity.served import ALL_LINEAR, Served, assert_rows_equal_peft, golden, random_prompt, serve
from tests.parity.test_model import llama

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""peft 0.21 reads the old name of a property that transformers renamed."""

TOLERANCE = 1e-4

CONFIGS: dict[str, dict[str, Any]] = {
    "rank8": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR},
    "rslora16": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    "partial": {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": [1]},
    "per-layer": {
        "r": 3,
        "lora_alpha": 7,
        "target_modules": r"model\.layers\.(0\.self_attn\.(q|k)_proj|1\.mlp\.gate_proj|2\.(self_attn\.o_proj|mlp\.down_proj))",
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL_LINEAR,
        "exclude_modules": ["layers.2.mlp.up_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 12, "down_proj": 2, r"model\.layers\.2\..*_proj": 5},
        "alpha_pattern": {"v_proj": 1, r"layers\.1\..*": 24, "k_proj": 3},
    },
    "patterns-rslora": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "o_proj"],
        "rank_pattern": {"q_proj": 9},
        "alpha_pattern": {"o_proj": 2},
    },
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("lora"), llama(), CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_saved_is_accepted_as_peft_reads_it(served: Served, name: str) -> None:
    report = served.reports[name]
    assert report.errors == () and report.warnings == ()
    theirs = {
        module_name.removeprefix("base_model.model."): module
        for module_name, module in served.theirs(name).named_modules()
        if hasattr(module, "lora_A")
    }
    assert report.modules == tuple(sorted(theirs))
    assert {module: report.ranks.get(module, report.rank) for module in report.modules} == {
        module: layer.r["default"] for module, layer in theirs.items()
    }


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_mixed_batch_equals_peft_row_by_row(served: Served, chunk: int | None) -> None:
    rng = random.Random(11)
    names = [None, "rank8", "rslora16", None, "partial", "per-layer", "patterns", "patterns-rslora", "per-layer", "rank8", None]
    prompts = [random_prompt(rng, served.model, num) for num in (9, 23, 40, 1, 17, 12, 31, 5, 8, 1, 33)]
    adapters = [served.adapters[name] if name else None for name in names]
    ours = logits(served.model, prompts, chunk=chunk, lora=adapters)
    assert_rows_equal_peft(served, names, prompts, ours, TOLERANCE)


def test_base_rows_are_what_they_are_without_adapters(served: Served) -> None:
    """Bit for bit, in a batch of the same shape: an adapter's rows never touch another's."""
    rng = random.Random(12)
    names = [None, "rank8", None, "rslora16", "partial", None, "patterns"]
    prompts = [random_prompt(rng, served.model, num) for num in (9, 23, 1, 17, 12, 31, 5)]
    adapters = [served.adapters[name] if name else None for name in names]
    mixed = logits(served.model, prompts, lora=adapters)
    alone = logits(served.model, prompts)
    for name, with_adapters, without in zip(names, mixed, alone, strict=True):
        assert torch.equal(with_adapters, without) is (name is None)


def test_adapters_in_any_order_and_alone_give_the_same(served: Served) -> None:
    rng = random.Random(13)
    names = [*CONFIGS, None]
    prompts = {name: random_prompt(rng, served.model, 14) for name in names}
    alone = {name: logits(served.model, [prompts[name]], lora=[served.adapters[name] if name else None])[0] for name in names}
    for _ in range(3):
        rng.shuffle(names)
        found = logits(served.model, [prompts[name] for name in names], lora=[served.adapters[name] if name else None for name in names])
        for name, each in zip(names, found, strict=True):
            torch.testing.assert_close(each, alone[name], rtol=TOLERANCE, atol=TOLERANCE)


def test_greedy_decoding_of_a_mixed_batch(served: Served) -> None:
    """16 tokens a row equal to peft's; a row may part from them only where our top two are closer than 1e-4."""
    rng = random.Random(14)
    names = [None, "rank8", "rslora16", "patterns", "partial"]
    prompts = [random_prompt(rng, served.model, 10) for _ in names]
    ours = greedy(served.model, prompts, 16, [served.adapters[name] if name else None for name in names])
    for name, prompt, found in zip(names, prompts, ours, strict=True):
        theirs = served.theirs(name)
        tokens = list(prompt)
        for token, margin in zip(found.token_ids, found.margins, strict=True):
            expected = int(golden(theirs, tokens)[-1].argmax())
            assert token == expected or margin < TOLERANCE, (name, len(tokens))
            tokens.append(token)
