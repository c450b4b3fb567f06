"""The demo model's perplexity on a text, in bfloat16, beside that of transformers' own bfloat16; and with its weights in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from loramux.engine.checkpoint import Checkpoint
from loramux.engine.model.load import load_model
from loramux.kernels.ops import Quantization
from loramux.kernels.select import select_ops
from tests.parity.harness import logits

WINDOW = 512
BFLOAT16 = 0.005
INT8 = 0.02
TEXT = Path(__file__).with_name("prose.txt")
"""Written for this test."""

Model = Callable[[list[int]], torch.Tensor]
"""Token ids to logits [T, V] at each of them."""


@pytest.fixture(scope="module")
def windows(demo_checkpoint: Checkpoint) -> list[list[int]]:
    token_ids = Tokenizer.from_file(str(demo_checkpoint.files_dir / "tokenizer.json")).encode(TEXT.read_text()).ids
    return [token_ids[start : start + WINDOW] for start in range(0, len(token_ids), WINDOW)]


@pytest.fixture(scope="module")
def transformers_perplexity(demo_model: Path, windows: list[list[int]]) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model.parent, gguf_file=demo_model.name, dtype=torch.bfloat16)
    return perplexity(lambda token_ids: model(torch.tensor([token_ids])).logits[0], windows)


@torch.inference_mode()
def perplexity(model: Model, windows: Sequence[list[int]]) -> float:
    """Of every token but a window's first, given those of its window before it."""
    losses = [
        torch.nn.functional.cross_entropy(model(token_ids)[:-1].float(), torch.tensor(token_ids[1:]), reduction="none")
        for token_ids in windows
    ]
    return math.exp(torch.cat(losses).double().mean().item())


def ours(checkpoint: Checkpoint, quantization: Quantization | None = None) -> Model:
    model = load_model(checkpoint, "cpu", "bfloat16", select_ops("cpu"), quantization)
    return lambda token_ids: logits(model, [token_ids])[0]


def test_bfloat16_is_as_sure_as_transformers(demo_checkpoint: Checkpoint, windows: list[list[int]], transformers_perplexity: float) -> None:
    found = perplexity(ours(demo_checkpoint), windows)
    print(f"{found:.4f}, transformers {transformers_perplexity:.4f}, over {sum(map(len, windows))} tokens")
    assert found == pytest.approx(transformers_perplexity, rel=BFLOAT16)


def test_8_bits_are_nearly_as_sure(demo_checkpoint: Checkpoint, windows: list[list[int]], transformers_perplexity: float) -> None:
    found = perplexity(ours(demo_checkpoint, "int8"), windows)
    print(f"{found:.4f}, transformers {transformers_perplexity:.4f}")
    assert found == pytest.approx(transformers_perplexity, rel=INT8)
