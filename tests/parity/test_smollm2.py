"""The demo model, read from its GGUF: 64 greedy tokens equal transformers' on 20 prompts, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from loramux.engine.checkpoint import Checkpoint, open_checkpoint
from loramux.engine.model.load import load_model
from loramux.kernels.select import select_ops
from tests.parity.harness import greedy

NUM_NEW_TOKENS = 64
TIE = 1e-4

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet, and when?",
    "Give me a JSON object with a name and an age.",
    "How do I boil an egg?",
    "What is 17 times 3?",
    "Summarise: The cat sat on the mat. The dog barked. The cat ran away and was not seen again until the evening.",
]
BEGINNINGS = [
    "Once upon a time",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n",
    "SELECT name, count(*) FROM",
    '{"name": "Ada Lovelace", "born":',
    "Dear customer,\n\nThank you for",
    "In 1969, the first",
    "Le chat est",
    "1, 1, 2, 3, 5, 8,",
    "The keeper of the lighthouse writes every evening what he has seen: the ships, the weather, the birds over the water.",
]


@pytest.fixture(scope="module")
def checkpoint(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(demo_model), tmp_path_factory.mktemp("checkpoints"))


@torch.no_grad()
def transformers_choices(model: Any, prompt: list[int], continuation: list[int]) -> list[int]:
    """transformers' likeliest token before each token of the continuation; its greedy run takes the same path while they agree."""
    logits = model(torch.tensor([prompt + continuation[:-1]]), logits_to_keep=len(continuation)).logits[0]
    return logits.argmax(-1).tolist()


def test_greedy_tokens_equal_transformers(demo_model: Path, checkpoint: Checkpoint) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint.files_dir / "tokenizer.json"))
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prompts = [tokenizer.encode(text).ids for text in (*chats, *BEGINNINGS)]
    assert prompts[0][0] == 1, "control tokens are read as such"
    ours = greedy(load_model(checkpoint, "cpu", "float32", select_ops("cpu")), prompts, NUM_NEW_TOKENS)
    theirs = AutoModelForCausalLM.from_pretrained(demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32)
    ties = 0
    for prompt, (token_ids, margins) in zip(prompts, ours, strict=True):
        choices = transformers_choices(theirs, prompt, token_ids)
        differing = next((at for at in range(NUM_NEW_TOKENS) if choices[at] != token_ids[at]), None)
        if differing is not None:
            assert margins[differing] < TIE, f"{tokenizer.decode(prompt)!r} differs at token {differing}"
            ties += 1
    print(f"{ties} of {len(prompts)} prompts differ, each at a tie closer than {TIE}")


def test_end_of_sequence_ids_and_vocabulary(checkpoint: Checkpoint) -> None:
    assert checkpoint.eos_token_ids == (0, 2)
    assert checkpoint.vocab_size == 49152
    assert (checkpoint.files_dir / "tokenizer_config.json").read_text().count("chat_template") == 1
