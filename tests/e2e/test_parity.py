"""Greedy completions over HTTP equal transformers with peft, in the same test."""

from __future__ import annotations

import concurrent.futures

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.e2e.conftest import World

# peft 0.21 asks transformers 5.24 in its old words
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

NUM_TOKENS = 24
PROMPTS = ["The keeper of the lighthouse", "When the storm came, the keeper lit the lamp and waited; in the morning " * 2, "SELECT name"]
NEAR_TIE = 1e-4


def _greedy(model: PreTrainedModel, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """Tokens, and for each how far the best logit was from the second."""
    token_ids, margins = list(prompt_ids), []
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([token_ids])).logits[0, -1]
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        token_ids.append(int(best.indices[0]))
    return token_ids[len(prompt_ids) :], margins


def test_greedy_completions_equal_peft(world: World) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    client = world.server.client(world.acme_key)
    jobs = [(name, tokenizer(prompt)["input_ids"]) for name in (None, *world.adapters) for prompt in PROMPTS]

    def ask(job: tuple[str | None, list[int]]) -> list[int]:
        name, prompt_ids = job
        answer = client.completions.create(
            model="tiny" if name is None else f"tiny:{name}",
            prompt=prompt_ids,
            max_tokens=NUM_TOKENS,
            temperature=0,
            logprobs=0,
            extra_body={"ignore_eos": True},
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None
        return list(logprobs.tokens)  # type: ignore[arg-type]

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(ask, jobs))
    num_ties = 0
    for name, directory in ((None, None), *world.adapters.items()):
        model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32).eval()
        if directory is not None:
            model = peft.PeftModel.from_pretrained(model, directory).eval()
        for (asked, prompt_ids), answer in zip(jobs, answers, strict=True):
            if asked != name:
                continue
            token_ids, margins = _greedy(model, prompt_ids)
            expected = [tokenizer.decode([token_id]) for token_id in token_ids]
            for position, (got, wanted) in enumerate(zip(answer, expected, strict=True)):
                if got != wanted:
                    assert margins[position] < NEAR_TIE, (name, position, got, wanted)
                    num_ties += 1
                    break
    print(f"{num_ties} near ties")
