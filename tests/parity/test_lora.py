"""Batches that mix the base and adapters, against peft one row at a time, to 1e-4 in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loramux.adapters.identity import content_digest
from loramux.adapters.peft_format import validate
from loramux.adapters.types import BaseDescription, RegistrationReport
from loramux.engine.model.decoder import DecoderModel
from loramux.lora.load import load_host_adapter
from loramux.lora.types import HostAdapter
from tests.checkpoints import save_model, save_tokenizer
from tests.parity.harness import greedy, logits, lora_slots, open_model
from tests.parity.test_model import SIZES, llama

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""peft 0.21 reads the old name of a property that transformers renamed."""

TOLERANCE = 1e-4
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

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
    "half": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR},
}


class Served(NamedTuple):
    """A tiny Llama, and adapters that peft made for it, as peft and as we read them from the same files."""

    model: DecoderModel
    directories: dict[str, Path]
    reports: dict[str, RegistrationReport]
    adapters: dict[str, HostAdapter]
    checkpoint: Path

    def theirs(self, name: str | None) -> torch.nn.Module:
        base = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32, attn_implementation="eager")
        return (base if name is None else PeftModel.from_pretrained(base, str(self.directories[name]))).eval()


def _write(checkpoint: Path, name: str, directory: Path) -> None:
    torch.manual_seed(len(name))
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(**CONFIGS[name], task_type="CAUSAL_LM"))
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(directory))
    if name == "half":
        file = directory / "adapter_model.safetensors"
        save_file({key: tensor.to(torch.bfloat16) for key, tensor in load_file(file).items()}, file)


def _describe(model: DecoderModel, checkpoint: Path) -> BaseDescription:
    return BaseDescription(
        digest="sha256:base",
        tokenizer_digest="",
        name=checkpoint.name,
        model_type="llama",
        vocab_size=SIZES["vocab_size"],
        max_model_len=SIZES["max_position_embeddings"],
        dtype="float32",
        eos_token_ids=(2,),
        max_lora_rank=64,
        modules=dict(model.modules),
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("lora")
    checkpoint = root / "base"
    checkpoint.mkdir()
    save_tokenizer(checkpoint)
    save_model(checkpoint, llama(), seed=5)
    model = open_model(checkpoint, root / "cache")
    directories, reports, adapters = {}, {}, {}
    for name in CONFIGS:
        directories[name] = root / name
        _write(checkpoint, name, directories[name])
        config = (directories[name] / "adapter_config.json").read_bytes()
        tensors = (directories[name] / "adapter_model.safetensors").read_bytes()
        reports[name] = validate(config, tensors, _describe(model, checkpoint))
        digest = content_digest(config, tensors)
        adapters[name] = load_host_adapter(digest, config, tensors, model, lora_slots(model))
    yield Served(model, directories, reports, adapters, checkpoint)


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(SIZES["vocab_size"]) for _ in range(num_tokens)]


@torch.no_grad()
def _golden(theirs: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    found: torch.Tensor = theirs(torch.tensor([prompt])).logits[0]
    return found


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
    names = [None, "rank8", "rslora16", None, "partial", "per-layer", "patterns", "patterns-rslora", "half", "rank8", None]
    prompts = [_prompt(rng, num) for num in (9, 23, 40, 1, 17, 12, 31, 5, 8, 1, 33)]
    adapters = [served.adapters[name] if name else None for name in names]
    ours = logits(served.model, prompts, chunk=chunk, lora=adapters)
    for name in dict.fromkeys(names):
        theirs = served.theirs(name)
        for row, prompt, found in zip(names, prompts, ours, strict=True):
            if row == name:
                torch.testing.assert_close(found, _golden(theirs, prompt), rtol=TOLERANCE, atol=TOLERANCE)


def test_base_rows_are_what_they_are_without_adapters(served: Served) -> None:
    """Bit for bit, in a batch of the same shape: an adapter's rows never touch another's."""
    rng = random.Random(12)
    names = [None, "rank8", None, "rslora16", "partial", None, "patterns"]
    prompts = [_prompt(rng, num) for num in (9, 23, 1, 17, 12, 31, 5)]
    adapters = [served.adapters[name] if name else None for name in names]
    mixed = logits(served.model, prompts, lora=adapters)
    alone = logits(served.model, prompts)
    for name, with_adapters, without in zip(names, mixed, alone, strict=True):
        assert torch.equal(with_adapters, without) is (name is None)


def test_adapters_in_any_order_and_alone_give_the_same(served: Served) -> None:
    rng = random.Random(13)
    names = [*CONFIGS, None]
    prompts = {name: _prompt(rng, 14) for name in names}
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
    prompts = [_prompt(rng, 10) for _ in names]
    ours = greedy(served.model, prompts, 16, [served.adapters[name] if name else None for name in names])
    for name, prompt, found in zip(names, prompts, ours, strict=True):
        theirs = served.theirs(name)
        tokens = list(prompt)
        for token, margin in zip(found.token_ids, found.margins, strict=True):
            expected = int(_golden(theirs, tokens)[-1].argmax())
            assert token == expected or margin < TOLERANCE, (name, len(tokens))
            tokens.append(token)
