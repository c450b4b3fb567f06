"""Adapters that peft itself writes, with a tiny model and the description of it that an engine would send."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from loramux.adapters.binding import Binding, BoundModule, bind
from loramux.adapters.peft_config import read_config, read_keys
from loramux.adapters.peft_format import validate
from loramux.adapters.peft_tensors import AdapterTensor, group_tensors, read_tensors
from loramux.adapters.types import BaseDescription, ModuleShape, RegistrationReport

VOCAB_SIZE, HIDDEN = 96, 32
Q0 = "model.layers.0.self_attn.q_proj"
O0 = "model.layers.0.self_attn.o_proj"
K1 = "model.layers.1.self_attn.k_proj"
EMBED, HEAD = "model.embed_tokens", "lm_head"
PEFT = "base_model.model."
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYWHERE = [*QKVO, "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]


class Adapter(NamedTuple):
    """An adapter_config.json and the tensors beside it."""

    keys: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def files(self) -> tuple[bytes, bytes]:
        return json.dumps(self.keys).encode(), save({name: tensor.contiguous() for name, tensor in self.tensors.items()})

    def report(self, base: BaseDescription) -> RegistrationReport:
        return validate(*self.files, base)

    def bound(self, base: BaseDescription) -> dict[str, BoundModule]:
        binding = self.binding(base)
        assert binding.errors == ()
        return {module.module: module for module in binding.modules}

    def binding(self, base: BaseDescription) -> Binding:
        config, tensors = self.files
        grouping = group_tensors(read_tensors(tensors))
        assert grouping.errors == ()
        return bind(read_config(read_keys(config)), grouping.modules, base.modules)

    def renamed(self, old: str, new: str) -> Adapter:
        assert any(old in name for name in self.tensors)
        return Adapter(self.keys, {name.replace(old, new): tensor for name, tensor in self.tensors.items()})

    def with_tensor(self, name: str, tensor: torch.Tensor | None) -> Adapter:
        """None takes it away."""
        others = {other: each for other, each in self.tensors.items() if other != name}
        assert tensor is not None or len(others) < len(self.tensors)
        return Adapter(self.keys, others if tensor is None else {**others, name: tensor})

    def with_keys(self, **changes: Any) -> Adapter:
        return Adapter({**self.keys, **changes}, self.tensors)


def tiny_qwen2(*, tied: bool = False) -> PreTrainedModel:
    """Random, with biases on q, k and v; always the same."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def describe(model: PreTrainedModel) -> BaseDescription:
    modules = dict(model.named_modules())
    return BaseDescription(
        digest="sha256:" + "b" * 64,
        tokenizer_digest="sha256:" + "c" * 64,
        name="tiny",
        model_type="qwen2",
        vocab_size=VOCAB_SIZE,
        max_model_len=128,
        dtype="float32",
        eos_token_ids=(2,),
        max_lora_rank=64,
        modules={name: shape for name, module in modules.items() if (shape := _shape(module))},
        saved_weight_digests={name: _digests(modules[name].weight.detach()) for name in (EMBED, HEAD)},
    )


def saved(directory: Path, model: PreTrainedModel, *, save_embedding_layers: bool | str = "auto", **config: Any) -> Adapter:
    """What peft saves of a model where every trained parameter has moved."""
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore"):
        adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config}))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        adapted.save_pretrained(str(directory), save_embedding_layers=save_embedding_layers)
    return read(directory)


def read(directory: Path) -> Adapter:
    return Adapter(json.loads((directory / "adapter_config.json").read_text()), load_file(directory / "adapter_model.safetensors"))


def loaded(directory: Path, adapter: Adapter, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state of the model with the adapter as peft loads it."""
    config, tensors = adapter.files
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes(config)
    (directory / "adapter_model.safetensors").write_bytes(tensors)
    with warnings.catch_warnings(action="ignore"):
        return dict(PeftModel.from_pretrained(model, str(directory)).state_dict())


def values(tensor: AdapterTensor | None) -> torch.Tensor:
    assert tensor is not None and tensor.dtype == "F32"
    return torch.frombuffer(tensor.data, dtype=torch.float32).view(tensor.shape)


def _shape(module: torch.nn.Module) -> ModuleShape | None:
    if isinstance(module, torch.nn.Linear):
        return ModuleShape(module.in_features, module.out_features, has_bias=module.bias is not None)
    if isinstance(module, torch.nn.Embedding):
        return ModuleShape(module.num_embeddings, module.embedding_dim, kind="embedding")
    return None


def _digests(matrix: torch.Tensor) -> dict[str, str]:
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    casts = {name: matrix.to(dtype).contiguous().view(torch.uint8).numpy().tobytes() for name, dtype in dtypes.items()}
    return {name: f"sha256:{hashlib.sha256(cast).hexdigest()}" for name, cast in casts.items()}


BASE = describe(tiny_qwen2())


def check_applied(adapter: Adapter, *keys: str, base: BaseDescription = BASE) -> RegistrationReport:
    """All of it is applied, the keys too."""
    report = adapter.report(base)
    assert report.errors == () and report.warnings == ()
    assert report.tensors_matched == report.tensors_total == len(adapter.tensors)
    assert set(keys) <= {verdict.key for verdict in report.keys if verdict.verdict == "applied"}
    return report


def refused(adapter: Adapter, base: BaseDescription = BASE) -> str:
    """The first error."""
    report = adapter.report(base)
    assert report.errors and report.tensors_matched < report.tensors_total
    return report.errors[0]
