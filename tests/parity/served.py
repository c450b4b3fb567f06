"""A tiny base, and adapters that peft made for it, as peft and as we read them from the same files."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from loramux.adapters.identity import content_digest
from loramux.adapters.peft_format import validate
from loramux.adapters.types import BaseDescription, RegistrationReport
from loramux.engine.checkpoint import open_checkpoint
from loramux.engine.model.decoder import DecoderModel
from loramux.engine.model.saved_embeddings import base_digests
from loramux.lora.load import load_host_adapter
from loramux.lora.types import HostAdapter
from tests.checkpoints import save_model, save_tokenizer
from tests.parity.harness import lora_slots, open_model

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Served(NamedTuple):
    model: DecoderModel
    directories: dict[str, Path]
    reports: dict[str, RegistrationReport]
    adapters: dict[str, HostAdapter]
    checkpoint: Path

    def theirs(self, name: str | None) -> torch.nn.Module:
        base = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32, attn_implementation="eager")
        return (base if name is None else PeftModel.from_pretrained(base, str(self.directories[name]))).eval()

    def merged(self, name: str) -> torch.nn.Module:
        merged: torch.nn.Module = self.theirs(name).merge_and_unload().eval()
        return merged

    def adapter(self, name: str | None) -> HostAdapter | None:
        return None if name is None else self.adapters[name]


def serve(root: Path, config: PretrainedConfig, configs: Mapping[str, dict[str, Any]], *, saved_as: torch.dtype | None = None) -> Served:
    """`configs` are peft's `LoraConfig`s by name; `saved_as` casts the tensors of their files."""
    checkpoint = root / "base"
    checkpoint.mkdir()
    save_tokenizer(checkpoint)
    save_model(checkpoint, config, seed=5)
    model = open_model(checkpoint, root / "cache")
    base = describe(model, checkpoint, root / "cache")
    directories, reports, adapters = {}, {}, {}
    for number, (name, lora_config) in enumerate(configs.items()):
        directories[name] = root / name
        _write(checkpoint, lora_config, directories[name], seed=number)
        if saved_as is not None:
            _cast(directories[name] / "adapter_model.safetensors", saved_as)
        files = [(directories[name] / file).read_bytes() for file in ("adapter_config.json", "adapter_model.safetensors")]
        reports[name] = validate(files[0], files[1], base)
        adapters[name] = load_host_adapter(content_digest(files[0], files[1]), files[0], files[1], model, lora_slots(model))
    return Served(model, directories, reports, adapters, checkpoint)


def _write(checkpoint: Path, config: Mapping[str, Any], directory: Path, seed: int) -> None:
    """Every parameter that would be trained is moved by noise, so that each has an effect of its own."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(**config, task_type="CAUSAL_LM"))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(str(directory))


def _cast(file: Path, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)


def describe(model: DecoderModel, checkpoint: Path, cache_dir: Path) -> BaseDescription:
    return BaseDescription(
        digest="sha256:base",
        tokenizer_digest="",
        name=checkpoint.name,
        model_type=model.config.architecture,
        vocab_size=model.config.vocab_size,
        max_model_len=model.config.max_position_embeddings,
        dtype="float32",
        eos_token_ids=(2,),
        max_lora_rank=64,
        modules=dict(model.modules),
        saved_weight_digests=base_digests(open_checkpoint(str(checkpoint), cache_dir), cache_dir),
    )


def random_prompt(rng: random.Random, model: DecoderModel, num_tokens: int) -> list[int]:
    return [rng.randrange(model.config.vocab_size) for _ in range(num_tokens)]


def assert_rows_equal_peft(
    served: Served, names: Sequence[str | None], prompts: Sequence[list[int]], found: Sequence[torch.Tensor], tolerance: float
) -> None:
    """found: logits [len(prompt), V] of each prompt under the adapter of its name; None is the base."""
    for name in dict.fromkeys(names):
        theirs = served.theirs(name)
        for row, prompt, ours in zip(names, prompts, found, strict=True):
            if row == name:
                torch.testing.assert_close(ours, golden(theirs, prompt), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def golden(theirs: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """Logits [len(prompt), V]."""
    found: torch.Tensor = theirs(torch.tensor([prompt])).logits[0]
    return found
