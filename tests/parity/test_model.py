"""Logits of tiny random checkpoints against transformers, to 1e-4 in float32."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from loramux.engine.model.decoder import DecoderModel
from tests.checkpoints import save_model, save_tokenizer
from tests.parity.harness import Harness, Run, logits, open_model

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def llama(rope: dict[str, Any] | None = None, **changes: Any) -> PretrainedConfig:
    return LlamaConfig(**SIZES, **({"rope_parameters": rope} if rope else {}), **changes)


VARIANTS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-biased": lambda: llama(attention_bias=True),
    "llama-head-dim": lambda: llama(head_dim=16),
    "llama-linear": lambda: llama({"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}),
    "llama-llama3": lambda: llama({"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}),
    "llama-yarn": lambda: llama(YARN),
    "llama-yarn-mscale": lambda: llama({**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 16.0}),
    "llama-yarn-factor": lambda: llama({**YARN, "attention_factor": 0.9}),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=17, head_dim=12),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "qwen3-biased": lambda: Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
}


class Pair(NamedTuple):
    theirs: PreTrainedModel
    ours: DecoderModel


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp(request.param)
    save_tokenizer(directory)
    theirs = save_model(directory, VARIANTS[request.param](), seed=len(request.param))
    return Pair(theirs, open_model(directory, directory / "cache"))


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(str(lengths))
    return [[rng.randrange(SIZES["vocab_size"]) for _ in range(length)] for length in lengths]


@torch.no_grad()
def golden(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_a_prompt_at_once_and_in_chunks(pair: Pair) -> None:
    (prompt,) = prompts_of(101)
    want = golden(pair.theirs, prompt)
    for chunk in (None, 37, 32, 5):
        (got,) = logits(pair.ours, [prompt], chunk=chunk)
        assert_close(got, want)


def test_token_by_token(pair: Pair) -> None:
    (prompt,) = prompts_of(45)
    (got,) = logits(pair.ours, [prompt], chunk=1)
    assert_close(got, golden(pair.theirs, prompt))


def test_the_second_half_over_cached_blocks_of_another_sequence(pair: Pair) -> None:
    prompt, other_end = prompts_of(96, 31)
    harness = Harness(pair.ours)
    first = harness.sequence(prompt, 96)
    harness.step([Run(first, 96)])
    second = harness.sequence(prompt[:64] + other_end, 95)
    second.blocks[:2] = first.blocks[:2]
    second.num_done = 64
    (got,) = harness.step([Run(second, 31)], all_rows=True)
    assert_close(got, golden(pair.theirs, second.tokens)[64:])


def test_a_batch_of_prefills_chunks_and_decodes(pair: Pair) -> None:
    prompts = prompts_of(1, 2, 33, 64, 77, 100)
    want = [golden(pair.theirs, prompt) for prompt in prompts]
    harness = Harness(pair.ours)
    sequences = [harness.sequence(prompt, len(prompt)) for prompt in prompts]
    before = [0, 1, 32, 30, 0, 99]
    for sequence, num_tokens in zip(sequences, before, strict=True):
        if num_tokens:
            harness.step([Run(sequence, num_tokens)])
    rests = [len(prompt) - num for prompt, num in zip(prompts, before, strict=True)]
    got = harness.step([Run(sequence, rest) for sequence, rest in zip(sequences, rests, strict=True)], all_rows=True)
    for rows, wanted, num_tokens in zip(got, want, before, strict=True):
        assert_close(rows, wanted[num_tokens:])


def test_sharded_weights(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    theirs = save_model(tmp_path, llama(), max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    (prompt,) = prompts_of(50)
    (got,) = logits(open_model(tmp_path, tmp_path / "cache"), [prompt])
    assert_close(got, golden(theirs, prompt))


@pytest.mark.parametrize(
    "rope", [{"type": "linear", "factor": 2.0}, {"rope_type": "llama3", **LLAMA3}, {"type": "yarn", "factor": 4.0}, None]
)
def test_rope_as_older_configurations_spell_it(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    save_tokenizer(tmp_path)
    new = {**rope, "rope_type": rope.get("rope_type") or rope["type"]} if rope else {"rope_type": "default"}
    new.pop("type", None)
    theirs = save_model(tmp_path, llama({**new, "rope_theta": 777.0}))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 777.0, "rope_scaling": rope}))
    (prompt,) = prompts_of(90)
    (got,) = logits(open_model(tmp_path, tmp_path / "cache"), [prompt])
    assert_close(got, golden(theirs, prompt))
