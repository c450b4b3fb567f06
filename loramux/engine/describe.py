"""A checkpoint's description of itself, which adapters are validated against."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from loramux.adapters.types import BaseDescription
from loramux.engine.checkpoint import Checkpoint, open_checkpoint
from loramux.engine.model.decoder import DecoderModel
from loramux.engine.model.load import load_model
from loramux.engine.model.saved_embeddings import base_digests
from loramux.kernels.reference.ops import ReferenceOps


def describe_base(
    checkpoint: Checkpoint, model: DecoderModel, cache_dir: Path, *, name: str, max_model_len: int, max_lora_rank: int
) -> BaseDescription:
    """`cache_dir` keeps digests that take seconds."""
    tokenizer = Tokenizer.from_file(str(checkpoint.files_dir / "tokenizer.json"))
    return BaseDescription(
        digest=checkpoint.digest,
        tokenizer_digest=checkpoint.tokenizer_digest,
        name=name,
        model_type=str(checkpoint.config["model_type"]),
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=checkpoint.eos_token_ids,
        max_lora_rank=max_lora_rank,
        modules=model.modules,
        saved_weight_digests=base_digests(checkpoint, cache_dir),
        added_tokens={token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()},
    )


def describe_checkpoint(path: str, cache_dir: Path, *, dtype: str, max_lora_rank: int) -> BaseDescription:
    """Of a checkpoint that is not served: its tensors are checked and not kept. Raises `StartupFailed`."""
    checkpoint = open_checkpoint(path, cache_dir)
    model = load_model(checkpoint, "meta", dtype, ReferenceOps())
    max_model_len = model.config.max_position_embeddings
    return describe_base(checkpoint, model, cache_dir, name=checkpoint.name, max_model_len=max_model_len, max_lora_rank=max_lora_rank)
