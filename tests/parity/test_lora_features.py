"""Each feature of PEFT's format, in batches that mix them, against peft row by row and against weights that peft merged."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen2Config

from tests.parity.harness import logits
from tests.parity.served import ALL_LINEAR, Served, assert_rows_equal_peft, golden, random_prompt, serve
from tests.parity.test_model import SIZES, llama

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'. .* LoRA tensor.s. have invalid shape"),  # peft 0.21 means lora_B.bias
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]
TOLERANCE = 1e-4

EVERYTHING = [*ALL_LINEAR, "embed_tokens", "lm_head"]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR},
    "dora": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR, "use_dora": True},
    "dora-some": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "up_proj"], "use_dora": True, "use_rslora": True},
    "dora-everything": {"r": 5, "lora_alpha": 10, "target_modules": EVERYTHING, "use_dora": True, "rank_pattern": {"embed_tokens": 3}},
    "dora-embedding": {"r": 6, "lora_alpha": 9, "target_modules": ["embed_tokens"], "use_dora": True},
    "lora-bias": {"r": 8, "lora_alpha": 12, "target_modules": ALL_LINEAR, "lora_bias": True},
    "embedding": {"r": 7, "lora_alpha": 14, "target_modules": ["embed_tokens"]},
    "head": {"r": 6, "lora_alpha": 6, "target_modules": ["lm_head"]},
    "everything": {"r": 8, "lora_alpha": 16, "target_modules": EVERYTHING, "use_rslora": True},
}
WITH_BIASES = {
    "bias": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "bias": "lora_only"},
    "dora-bias": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"], "bias": "lora_only", "use_dora": True},
    "lora-bias-and-bias": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "bias": "lora_only", "lora_bias": True},
}
WITHOUT_EMBEDDINGS = {name: config for name, config in CONFIGS.items() if not {"embed_tokens", "lm_head"} & {*config["target_modules"]}}
"""With one, peft saves the base's own matrix, and would load it as rounded as its file is."""
BASES: dict[str, tuple[PretrainedConfig, dict[str, dict[str, Any]], torch.dtype | None]] = {
    "llama": (llama(), CONFIGS, None),
    "llama-tied": (llama(tie_word_embeddings=True), CONFIGS, None),
    "llama-bfloat16-files": (llama(), WITHOUT_EMBEDDINGS, torch.bfloat16),
    "llama-float16-files": (llama(), WITHOUT_EMBEDDINGS, torch.float16),
    "qwen2": (Qwen2Config(**SIZES), CONFIGS | WITH_BIASES, None),
}
CANNOT_MERGE = {"lora-bias", "lora-bias-and-bias"}
"""peft merges no bias into a layer that has none."""


@pytest.fixture(scope="module", params=BASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    config, configs, saved_as = BASES[request.param]
    return serve(tmp_path_factory.mktemp("features"), config, configs, saved_as=saved_as)


def test_what_peft_saved_is_accepted_whole(served: Served) -> None:
    for name, report in served.reports.items():
        assert (report.errors, report.warnings) == ((), ()), name
        assert report.tensors_matched == report.tensors_total


def test_a_mixed_batch_equals_peft_row_by_row(served: Served) -> None:
    rng = random.Random(21)
    names: list[str | None] = [None, *served.adapters, None, *served.adapters]
    rng.shuffle(names)
    prompts = [random_prompt(rng, served.model, rng.choice((1, 4, 9, 17, 33))) for _ in names]
    ours = logits(served.model, prompts, chunk=11, lora=[served.adapter(name) for name in names])
    assert_rows_equal_peft(served, names, prompts, ours, TOLERANCE)


def test_merged_weights_say_the_same(served: Served) -> None:
    """But where embedding and output layer are one matrix, of which peft merges what is meant for one."""
    rng = random.Random(22)
    mergeable = WITHOUT_EMBEDDINGS if served.model.config.tie_word_embeddings else served.adapters
    names = [name for name in mergeable if name not in CANNOT_MERGE]
    prompts = {name: random_prompt(rng, served.model, 19) for name in names}
    ours = logits(served.model, list(prompts.values()), lora=[served.adapters[name] for name in names])
    for name, found in zip(names, ours, strict=True):
        torch.testing.assert_close(found, golden(served.merged(name), prompts[name]), rtol=TOLERANCE, atol=TOLERANCE)


def test_every_feature_has_an_effect(served: Served) -> None:
    """Else the tests above would pass with an adapter that is not applied."""
    prompt = random_prompt(random.Random(23), served.model, 9)
    base, *adapted = logits(served.model, [prompt] * (1 + len(served.adapters)), lora=[None, *served.adapters.values()])
    assert all((found - base).abs().max() > 0.05 for found in adapted)
