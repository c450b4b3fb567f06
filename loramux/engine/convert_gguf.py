"""Write what a GGUF file says besides its weights as Hugging Face files: `python -m loramux.engine.convert_gguf SRC DEST`.

A process of its own, because it imports transformers and torch. On failure the last line of stderr says why.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import gguf

from loramux.engine.model.config import parse_config
from loramux.errors import StartupFailed

END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""Control tokens that end an answer though a file may name only one end-of-sequence id."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def convert(source: Path, directory: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json and tokenizer_config.json. Raises `StartupFailed`."""
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise StartupFailed(f"it can't be read as GGUF ({error}); download it again") from error
    config = config_of(reader)
    parse_config(config)
    directory.mkdir()
    _save_tokenizer(source, directory)
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"bos_token_id": config["bos_token_id"], "eos_token_id": end_ids(reader)})


def config_of(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The file's hyperparameters in the words of config.json. Raises `StartupFailed` for an architecture the decoder does not have."""
    architecture = _value(reader, "general.architecture")
    if architecture not in _ARCHITECTURES:
        raise StartupFailed(f"GGUF architecture {architecture!r} is not supported; serve one of {', '.join(_ARCHITECTURES)}")
    if _value(reader, "split.count", 1) > 1:
        raise StartupFailed("it is one part of a split GGUF; merge the parts with llama.cpp's gguf-split")

    def of_model(name: str, default: Any = None) -> Any:
        return _value(reader, f"{architecture}.{name}", default)

    num_heads, hidden_size = of_model("attention.head_count"), of_model("embedding_length")
    window = of_model("attention.sliding_window")
    if window and architecture != "llama":
        raise StartupFailed(f"sliding window attention of GGUF architecture {architecture!r} is not supported")
    return {
        "architectures": ["MistralForCausalLM" if window else _ARCHITECTURES[architecture]],
        "model_type": "mistral" if window else architecture,
        "vocab_size": _embedding_rows(reader),
        "hidden_size": hidden_size,
        "intermediate_size": of_model("feed_forward_length"),
        "num_hidden_layers": of_model("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": of_model("attention.head_count_kv", num_heads),
        "head_dim": of_model("attention.key_length") or of_model("rope.dimension_count") or hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": of_model("context_length"),
        "rms_norm_eps": of_model("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(of_model),
        "sliding_window": window,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
    }


def end_ids(reader: gguf.GGUFReader) -> list[int]:
    """Every token that ends an answer, ascending."""
    named = [_value(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = {int(token_id) for token_id in named if token_id is not None}
    tokens, types = _value(reader, "tokenizer.ggml.tokens", []), _value(reader, "tokenizer.ggml.token_type", [])
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if token in END_OF_TURN_TOKENS and kind in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED):
            ids.add(token_id)
    return sorted(ids)


def _value(reader: gguf.GGUFReader, name: str, default: Any = None) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _embedding_rows(reader: gguf.GGUFReader) -> int:
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            return int(tensor.shape[1])
    raise StartupFailed("it has no tensor token_embd.weight; download it again")


def _rope_parameters(of_model: Any) -> dict[str, Any]:
    """llama3's scaling is a tensor of the file, `rope_freqs.weight`, and not named here."""
    rope_type = of_model("rope.scaling.type", "none")
    parameters = {"rope_type": "default" if rope_type == "none" else rope_type, "rope_theta": of_model("rope.freq_base", 10000.0)}
    if rope_type != "none":
        parameters["factor"] = of_model("rope.scaling.factor")
        parameters["original_max_position_embeddings"] = of_model("rope.scaling.original_context_length")
    if rope_type == "yarn":
        return parameters | _yarn_parameters(of_model, parameters["factor"])
    _refuse_other(of_model, "attn_factor", 1.0)
    return parameters


def _yarn_parameters(of_model: Any, factor: Any) -> dict[str, Any]:
    """`attn_factor` multiplies what yarn makes of `factor`, as in llama.cpp. The log multiplier, which llama.cpp reads for other
    architectures only, and whose unit depends on the converter, is refused."""
    for name, default in (("yarn_log_multiplier", 0.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        _refuse_other(of_model, name, default)
    parameters = {"beta_fast": of_model("rope.scaling.yarn_beta_fast"), "beta_slow": of_model("rope.scaling.yarn_beta_slow")}
    attention_factor = of_model("rope.scaling.attn_factor", 1.0)
    if attention_factor != 1.0 and factor:
        parameters["attention_factor"] = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return parameters


def _refuse_other(of_model: Any, name: str, default: float) -> None:
    value = of_model(f"rope.scaling.{name}", default)
    if value != default:
        raise StartupFailed(f"GGUF rope.scaling.{name} {value:g} is not supported, only {default:g}; serve the original checkpoint instead")


def _save_tokenizer(source: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(directory)
    if not (directory / "tokenizer.json").exists():
        raise StartupFailed("its tokenizer has no tokenizer.json form; serve the original checkpoint instead")
    template_file = directory / "chat_template.jinja"
    if template_file.exists():
        config_file = directory / "tokenizer_config.json"
        _write(config_file, {**json.loads(config_file.read_text()), "chat_template": template_file.read_text()})
        template_file.unlink()


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> int:
    source, directory = (Path(argument) for argument in sys.argv[1:])
    try:
        convert(source, directory)
    except StartupFailed as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
