"""Values that leave or enter the engine: requests, token deltas, terminal records, and the engine's description of itself.

All are frozen and cross the process boundary as MessagePack (`protocol.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.adapters.types import BaseDescription
from loramux.errors import Failure
from loramux.grammar.types import Constraint


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen. Applied in the order: constraint and bias, penalties, temperature, min_p, top_k, top_p.

    The gateway has validated every range.
    """

    max_tokens: int
    seed: int
    """Always set: the gateway draws one where the client gave none. Noise is a function of (seed, choice, position)."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences never completed."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """Alternatives reported per completion token; 0 is the sampled token alone, None reports nothing."""
    num_prompt_logprobs: int | None = None
    """The same per prompt token. Such a request reads no cached block."""


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request, fully resolved. Filled by `gateway/openai`; read by the scheduler."""

    id: str
    tenant_id: str
    key_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: bytes
    """The tenant's cache salt, never empty; blocks are shared only under the same salt."""
    adapter_digest: str | None = None
    """`sha256:<hex>`; None is the base."""
    n: int = 1
    constraint: Constraint | None = None
    priority: int = 0
    """Within the tenant; a lower value goes first."""
    weight: float = 1.0
    """The tenant's share."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the raw logits."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), the most likely first."""


FinishReason = Literal["stop", "length", "error"]


class TokenDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step added to one choice."""

    request_id: str
    index: int
    """The choice, 0 to n-1."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text now certain: never half a character, never a part of a stop string."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token id, where asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """On the first delta of choice 0, where asked for: one per prompt token, the first None."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for end of sequence, length or the grammar's end."""


class RequestEnd(msgspec.Struct, frozen=True, omit_defaults=True):
    """The terminal record: exactly one per request, however it ended."""

    request_id: str
    end: Literal["finished", "aborted", "failed"]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens read from the prefix cache, for the first choice."""
    num_completion_tokens: int
    """Over all choices."""
    failure: Failure | None = None


class EngineInfo(msgspec.Struct, frozen=True):
    """Sent by an engine when it is ready, and again to every gateway that says hello."""

    engine_id: str
    epoch: str
    """Random per process start: a new one means that everything known of the engine is void."""
    base: BaseDescription
    device: str
    kernels: str
    """Which implementation runs: `reference` or `cpu-<instruction set>`."""
    block_size: int
    num_blocks: int
    kv_capacity_tokens: int
    max_loras: int
    max_num_seqs: int


class AdapterResidency(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an engine has an adapter. Sent when it changes, and once more when it is gone."""

    digest: str
    tier: Literal["none", "host", "device"]
    """The highest that holds it; what is on the device is in host memory too."""
    state: Literal["ready", "loading", "draining"] = "ready"
    """loading: on its way to host memory. draining: dropped, and still used by running requests."""
    pinned: bool = False
    """By the operator, in its tier or above."""
    num_bytes: int = 0
    """In host memory; 0 until it is loaded."""
    rank: int = 0
    """0 until it is loaded."""

    @property
    def is_gone(self) -> bool:
        return self.tier == "none" and self.state == "ready"


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and counters of an engine, published about once a second and on request."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks_used: int = 0
    """Held by sequences; cached blocks that nobody holds count as free."""
    num_blocks_cached: int = 0
    num_slots_used: int = 0
    """Held by running sequences, or reserved for waiting ones."""
    num_host_adapters: int = 0
    host_adapter_bytes: int = 0
    num_adapters_loading: int = 0
    """On their way to host memory."""
    num_grammars: int = 0
    """Matchers held by sequences."""
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_preemptions: int = 0
    num_adapter_loads: int = 0
    """Into host memory, the failed ones not counted."""
    num_adapter_evictions: int = 0
    """From host memory: for room, or because the adapter was dropped."""
    num_slot_turns: int = 0
    """Slots taken from an adapter in use, for one that had waited."""
