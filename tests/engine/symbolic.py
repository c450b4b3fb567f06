"""A model of pure bookkeeping, to test the scheduler without weights.

Every KV cell holds a digest of all that it must depend on: base, adapter, salt and each token up to it. Computing a token reads the
cells before it through the block table and checks them, so a block that is shared, reused or reassigned wrongly is caught at once. The
next token is a function of the last cell, seed and choice: `lone_run` gives the same without blocks, batches or preemption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Tokens

from loramux.engine.plan import Chunk, SampledToken, StepPlan, StepResult
from loramux.engine.prefix import BLOCK_SIZE, root_key
from loramux.engine.sequence import RequestState
from loramux.engine.types import GenerationRequest, SamplingParams, TokenLogprob
from loramux.kernels.ops import AdapterWeights
from loramux.lora.types import HostAdapter

VOCAB = 7
BASE_DIGEST = "sha256:base"


def _cell(parent: bytes, token_id: int) -> bytes:
    return hashlib.blake2b(parent + bytes([token_id]), digest_size=8).digest()


def _next(cell: bytes, seed: int, choice: int) -> int:
    return hashlib.blake2b(cell + f"{seed}.{choice}".encode(), digest_size=8).digest()[0] % VOCAB


def lone_run(request: GenerationRequest) -> list[list[int]]:
    """Completion tokens of every choice, `stop_token_ids` honoured."""
    outputs = []
    for choice in range(request.n):
        cell, out = root_key(BASE_DIGEST, request.adapter_digest, request.salt), []
        for token in request.prompt_token_ids:
            cell = _cell(cell, token)
        while len(out) < request.sampling.max_tokens and not (out and out[-1] in request.sampling.stop_token_ids):
            out.append(_next(cell, request.sampling.seed, choice))
            cell = _cell(cell, out[-1])
        outputs.append(out)
    return outputs


def make_state(request: GenerationRequest, arrival: int, num_pages: int = 0) -> RequestState:
    digest = request.adapter_digest
    adapter = HostAdapter(digest=digest, rank=1, num_bytes=1, num_pages=num_pages, weights=AdapterWeights(())) if digest else None
    return RequestState(
        request=request,
        arrival=arrival,
        adapter=adapter,
        grammar=None,
        root=root_key(BASE_DIGEST, digest, request.salt),
        stop_ids=frozenset(request.sampling.stop_token_ids),
        eos_ids=frozenset(),
    )


def make_request(request_id: str, prompt: Tokens[int], *, tenant: str = "acme", **fields: object) -> GenerationRequest:
    """A request with sampling fields and request fields mixed freely."""
    sampling = {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__struct_fields__}
    return GenerationRequest(
        id=request_id,
        tenant_id=tenant,
        key_id=f"{tenant}.0",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**{"max_tokens": 8, "seed": 1, **sampling}),  # type: ignore[arg-type]
        salt=tenant.encode(),
        **fields,  # type: ignore[arg-type]
    )


class SymbolicRunner:
    """Stands where `ModelRunner` does."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], bytes] = {}
        self.num_computed_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        by_slot: dict[int, str | None] = {}
        for chunk in plan.chunks:
            slot, digest = chunk.sequence.slot, chunk.sequence.request.request.adapter_digest
            assert (slot is None) == (digest is None), "an adapter needs a slot, the base takes none"
            if slot is not None:
                assert by_slot.setdefault(slot, digest) == digest, "two adapters in one slot"
        results = [self._compute(chunk) for chunk in plan.chunks]
        return StepResult([sampled for sampled, _ in results], [logprobs for _, logprobs in results])

    def _compute(self, chunk: Chunk) -> tuple[SampledToken | None, list[TokenLogprob]]:
        sequence, state = chunk.sequence, chunk.sequence.request
        cell = state.root
        for position, token in enumerate(sequence.token_ids[: chunk.start + chunk.num_tokens]):
            cell = _cell(cell, token)
            place = (sequence.blocks.ids[position // BLOCK_SIZE], position % BLOCK_SIZE)
            if position < chunk.start:
                assert self._cells[place] == cell, f"block {place} does not hold what the sequence computed"
            else:
                self._cells[place] = cell
        self.num_computed_tokens += chunk.num_tokens
        logprobs: list[TokenLogprob] = []
        if chunk.wants_prompt_logprobs:
            targets = state.request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
            logprobs = [TokenLogprob(token, -float(chunk.start + 1 + offset), 1) for offset, token in enumerate(targets)]
        sampled = SampledToken(_next(cell, state.request.sampling.seed, sequence.index)) if chunk.samples else None
        return sampled, logprobs
