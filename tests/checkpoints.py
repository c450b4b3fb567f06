"""Tiny random checkpoints, complete directories as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PretrainedConfig, PreTrainedModel

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, IM_START, IM_END = range(3)
VOCAB_SIZE = 384

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TRAINING_TEXT = """
The keeper of the lighthouse writes every evening what he has seen: the ships, the weather, the birds over the water.
On some days there is nothing to write, and he writes that. "Nothing," he says, "is also something that somebody has seen."
{"name": "Ada", "age": 36, "tags": ["mathematics", "engines"], "active": true, "score": 12.5, "address": null}
SELECT name, count(*) FROM orders WHERE status = 'open' GROUP BY name ORDER BY count(*) DESC LIMIT 10;
When the storm came, the keeper lit the lamp and waited; in the morning the sea was quiet, and the lamp was still burning.
"""


def save_tokenizer(directory: Path) -> None:
    """Write tokenizer.json (byte-level BPE, `VOCAB_SIZE` tokens) and tokenizer_config.json with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT.splitlines(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the training text gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML_TEMPLATE,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def save_model(directory: Path, config: PretrainedConfig, *, seed: int = 0, max_shard_size: str = "5GB") -> PreTrainedModel:
    """Write a random float32 model of this configuration, and return it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    model.generation_config = GenerationConfig(bos_token_id=IM_START, eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=END_OF_TEXT)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def save_tiny_llama(directory: Path) -> None:
    """A complete Llama: 2 layers, hidden 64, 4 heads over 2 key heads. Logits spread enough that ties are rare.

    8,192 positions: a stream may outlast what is done meanwhile.
    """
    save_tokenizer(directory)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
    )
    save_model(directory, config)
