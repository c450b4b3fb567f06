"""Puts an engine together from its settings: checkpoint, model, KV blocks, adapters, grammars."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from loramux.engine.checkpoint import open_checkpoint
from loramux.engine.config import EngineConfig
from loramux.engine.core import EngineCore
from loramux.engine.describe import describe_base
from loramux.engine.detokenize import TextStream
from loramux.engine.model.decoder import DecoderModel
from loramux.engine.model.load import load_model
from loramux.engine.prefix import BLOCK_SIZE
from loramux.engine.runner import ModelRunner
from loramux.engine.step_budget import PROBED_CHUNK, PROBED_CONTEXT, PROBED_TOKENS, StepBudget, StepTimes
from loramux.engine.types import EngineInfo, GenerationRequest
from loramux.errors import StartupFailed
from loramux.grammar.service import WorkerGrammarService
from loramux.kernels.ops import LoraLimits
from loramux.kernels.select import select_ops
from loramux.lora.host_cache import HostCache
from loramux.lora.load import load_host_adapter
from loramux.lora.slots import SlotTable
from loramux.lora.types import HostAdapter

log = logging.getLogger(__name__)

GIB = 1 << 30

CPU_SLOT_TURN_STEPS = 4
"""How long an adapter keeps its slot though others wait: on a CPU a change of slots moves nothing."""
DEVICE_SLOT_TURN_STEPS = 32
"""Elsewhere it moves the adapter to the device."""

FetchAdapter = Callable[[str], tuple[bytes, bytes]]
"""Digest to (adapter_config.json, adapter_model.safetensors). Blocking; called from a loader thread. Raises `LoramuxError`."""


def build_core(config: EngineConfig, fetch_adapter: FetchAdapter, wake: Callable[[], None]) -> EngineCore:
    """Load everything and probe it with one step. Raises `StartupFailed`."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = _device(config.device)
    ops = select_ops(device)
    checkpoint = open_checkpoint(config.model, _checkpoint_cache(config))
    grammars = WorkerGrammarService(checkpoint.files_dir / "tokenizer.json", checkpoint.vocab_size, checkpoint.eos_token_ids)
    model = load_model(checkpoint, device, config.dtype, ops, config.quantization)
    num_blocks = _num_blocks(config, model)
    tokenizer = Tokenizer.from_file(str(checkpoint.files_dir / "tokenizer.json"))
    base = describe_base(
        checkpoint,
        model,
        _checkpoint_cache(config),
        name=config.name or checkpoint.name,
        max_model_len=_max_model_len(config.max_model_len, model.config.max_position_embeddings, num_blocks * BLOCK_SIZE),
        max_lora_rank=config.max_lora_rank,
    )
    info = EngineInfo(
        engine_id=f"engine-{os.getpid()}",
        epoch=secrets.token_hex(8),
        base=base,
        device=device,
        kernels=ops.name,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        kv_capacity_tokens=num_blocks * BLOCK_SIZE,
        max_loras=config.max_loras,
        max_num_seqs=config.max_num_seqs,
    )
    slots = ops.lora_slots(model.lora_shape, _lora_limits(config))
    runner = ModelRunner(model, ops, slots, num_blocks=num_blocks, max_num_seqs=config.max_num_seqs)

    def load_adapter(digest: str) -> HostAdapter:
        adapter_config, tensors = fetch_adapter(digest)
        return load_host_adapter(digest, adapter_config, tensors, model, slots)

    return EngineCore(
        info,
        runner=runner,
        text_factory=lambda request: text_stream(tokenizer, request),
        grammars=grammars,
        adapters=HostCache(int(config.lora_host_gib * GIB), load_adapter),
        slots=SlotTable(config.max_loras, slots.num_pages),
        slot_turn_steps=CPU_SLOT_TURN_STEPS if device == "cpu" else DEVICE_SLOT_TURN_STEPS,
        budget=_step_budget(runner, config.max_num_batched_tokens),
        wake=wake,
    )


def text_stream(tokenizer: Tokenizer, request: GenerationRequest) -> TextStream:
    """Of one choice of the request."""
    return TextStream(
        tokenizer,
        request.sampling.stop,
        prompt_token_ids=request.prompt_token_ids,
        min_tokens=request.sampling.min_tokens,
        whole_start=request.constraint is not None,
    )


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise StartupFailed("--device cuda: no CUDA device is available; use --device cpu")
    return device


def _num_blocks(config: EngineConfig, model: DecoderModel) -> int:
    """How many KV blocks the memory budget holds."""
    kv_bytes = config.kv_cache_gib * GIB if config.kv_cache_gib is not None else min(4 * GIB, _memory_bytes() / 8)
    return int(kv_bytes // (model.kv_bytes_per_token() * BLOCK_SIZE))


def _step_budget(runner: ModelRunner, max_num_tokens: int) -> StepBudget:
    """Calibrated by steps of this engine on this machine, each tried twice; the whole where there is no room to try them."""

    def seconds(num_tokens: int, num_before: int = 0) -> float:
        return min(runner.time_step(num_tokens, num_before) for _ in range(2))

    if max_num_tokens < PROBED_CHUNK or runner.kv_capacity_tokens < PROBED_CONTEXT + PROBED_CHUNK:
        return StepBudget(max_num_tokens)
    of_sizes = {size: seconds(size) for size in PROBED_TOKENS if size <= max_num_tokens}
    return StepBudget(max_num_tokens, StepTimes(of_sizes, seconds(PROBED_CHUNK, PROBED_CONTEXT)))


def _lora_limits(config: EngineConfig) -> LoraLimits:
    return LoraLimits(
        num_slots=config.max_loras,
        max_rank=config.max_lora_rank,
        max_num_tokens=config.max_num_batched_tokens,
        memory_bytes=None if config.lora_memory_gib is None else int(config.lora_memory_gib * GIB),
    )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _checkpoint_cache(config: EngineConfig) -> Path:
    return Path(config.data_dir) / "checkpoints"


def _max_model_len(asked: int | None, of_checkpoint: int, kv_capacity_tokens: int) -> int:
    """What is asked for, or all that the checkpoint allows and the KV blocks hold. Raises `StartupFailed` where what is asked won't fit."""
    if kv_capacity_tokens < 2 * BLOCK_SIZE:
        raise StartupFailed(f"the KV cache holds only {kv_capacity_tokens} tokens; raise --kv-cache-gib")
    if asked is None:
        return min(of_checkpoint, kv_capacity_tokens)
    if asked > of_checkpoint:
        raise StartupFailed(f"--max-model-len {asked} is more than the checkpoint's {of_checkpoint}")
    if asked > kv_capacity_tokens:
        raise StartupFailed(f"--max-model-len {asked} is more than the KV cache holds ({kv_capacity_tokens} tokens); raise --kv-cache-gib")
    return asked
