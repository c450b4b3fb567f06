"""A byte-level BPE tokenizer of a few hundred tokens, trained here, with the files a checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = ["the quick brown fox jumps over the lazy dog", "user assistant system", '{"city": "Rome", "size": 3}', "hello there, how are you?"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ns.system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, loop_messages = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}
    {%- set system, loop_messages = '', messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}"""

TOJSON = "{% for m in messages %}{{ {'role': m.role, 'content': m.content} | tojson(indent=1) }}<|im_end|>{% endfor %}"

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def byte_level_tokenizer(vocab_size: int = 384, *, bos: bool = False) -> Tokenizer:
    """Ids 0 to 6 are `SPECIAL`; `[INST]` and `[/INST]` are added but not special. `bos` makes the tokenizer prepend <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("[INST]"), AddedToken("[/INST]")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """The older Llama kind: spaces as U+2581, one before the text, unknown characters as bytes."""
    letters = [*'abcdefghijklmnopqrstuvwxyzR{}":,?0123456789', "\u2581", "\u2581a", "th", "he"]
    alphabet = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "a"), ("t", "h"), ("h", "e")], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def write_tokenizer(files_dir: Path, tokenizer: Tokenizer, chat_template: Any = CHATML, **config: Any) -> Path:
    """tokenizer.json and tokenizer_config.json, as a checkpoint has them. Returns `files_dir`."""
    files_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(files_dir / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "chat_template": chat_template}
    (files_dir / "tokenizer_config.json").write_text(json.dumps(settings | config), encoding="utf-8")
    return files_dir
