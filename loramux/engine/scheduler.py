"""Decides what each step computes, and applies what came of it. There is no prefill or decode phase, only a token budget.

`schedule` hands out the budget: decodes first, then the rest of prompts already begun, then waiting sequences in fair order. A sequence
starts all or nothing: its adapter's slot and the blocks of all tokens known are taken together. Where slots are short `slot_turns` shares
them: a sequence whose turn is over is suspended, it waits again but keeps its blocks. When blocks run out, suspended sequences lose theirs
first, the last in fair order before the others; then a running sequence is preempted: of the tenant served most for its weight, the lowest
priority, the last to start. Both are recomputed later.

`apply` is the only place where a step changes a sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from loramux.engine.block_pool import BlockPool
from loramux.engine.fair_queue import FairQueue
from loramux.engine.outcome import collect_prompt_logprobs, judge, token_delta
from loramux.engine.plan import Chunk, SampledToken, StepPlan, StepResult
from loramux.engine.prefix import BLOCK_SIZE
from loramux.engine.sequence import BlockTable, RequestState, Sequence, TextStream
from loramux.engine.slot_turns import SlotTurns
from loramux.engine.step_budget import Allowance, StepBudget
from loramux.engine.types import GenerationRequest, RequestEnd, TokenDelta
from loramux.errors import EngineFailed, Failure, GrammarTooComplex
from loramux.lora.slots import SlotTable

EndKind = Literal["finished", "aborted", "failed"]
TextFactory = Callable[[GenerationRequest], TextStream]


@dataclass
class Outputs:
    """What steps have produced since it was last taken."""

    deltas: list[TokenDelta] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)


@dataclass
class Counters:
    """Totals since start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_preemptions: int = 0


class _Step:
    """The plan under construction."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self.num_left = allowance.num_tokens
        self.num_tokens: dict[Sequence, int] = {}

    def affords(self, sequence: Sequence) -> int:
        """How many of its tokens."""
        return min(sequence.num_uncomputed_tokens, self._allowance.affords(self.num_left, _num_before(sequence)))

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_tokens[sequence] = num_tokens
        self.num_left -= self._cost(sequence, num_tokens)

    def drop(self, sequence: Sequence) -> None:
        self.num_left += self._cost(sequence, self.num_tokens.pop(sequence, 0))

    def _cost(self, sequence: Sequence, num_tokens: int) -> int:
        return min(self._allowance.num_tokens, self._allowance.cost(num_tokens, _num_before(sequence)))


class Scheduler:
    """Owns every sequence from admission to its end. Not thread-safe: the engine's loop is its only caller.

    A sequence is in one of three states:

        waiting    in the queue, holds nothing
        suspended  in the queue, holds the blocks of what it has computed, and no slot
        running    holds blocks and, where it has an adapter, a slot

    There is no deadlock. While something runs it gets on: it may take the blocks of the suspended, then of other running sequences. When
    nothing runs, a slot is reserved for an adapter that a waiting sequence has, or every slot is free but the pinned, which leave one: so
    some waiting sequence can have its slot. The first such in line may take all blocks of the suspended, which are then all there are, and
    a sequence never needs more. Each turn on a slot gives its sequence a token at least, so that turns don't go on for ever.
    """

    def __init__(
        self,
        blocks: BlockPool,
        slots: SlotTable,
        *,
        max_num_seqs: int,
        budget: StepBudget,
        max_model_len: int,
        text_factory: TextFactory,
        slot_turn_steps: int = 4,
    ) -> None:
        """`slot_turn_steps` is how long an adapter keeps its slot though others wait for it: the more, the costlier a change of slots."""
        self.slot_turns = SlotTurns(slots, slot_turn_steps)
        self._blocks = blocks
        self._slots = slots
        self._max_num_seqs = max_num_seqs
        self._budget = budget
        self._max_model_len = max_model_len
        self._text_factory = text_factory
        self._requests: dict[str, RequestState] = {}
        self._queue: FairQueue[Sequence] = FairQueue()
        self._running: dict[Sequence, int] = {}
        """With the order in which each started."""
        self._suspended: dict[Sequence, None] = {}
        self._num_starts = 0
        self._outputs = Outputs()
        self.counters = Counters()

    # Requests in and out

    def add(self, state: RequestState) -> None:
        """Admit a request. Its first choice waits; the others wait until the first has computed the prompt whose blocks they share."""
        request = state.request
        for index in range(request.n):
            matcher = state.grammar.new_matcher() if state.grammar else None
            state.sequences.append(Sequence(state, index, self._text_factory(request), list(request.prompt_token_ids), matcher))
            self._queue.enter(request.tenant_id, request.weight)
        self._requests[request.id] = state
        self._wait(state.sequences[0])

    def abort(self, request_id: str) -> bool:
        """End a request now. False if it is not here (any more)."""
        state = self._requests.get(request_id)
        if state is None:
            return False
        self._end(state, "aborted")
        return True

    def take_outputs(self) -> Outputs:
        outputs, self._outputs = self._outputs, Outputs()
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The suspended among them."""
        return len(self._queue)

    @property
    def num_suspended(self) -> int:
        return len(self._suspended)

    @property
    def num_matchers(self) -> int:
        return sum(1 for state in self._requests.values() for sequence in state.sequences if sequence.matcher)

    def _wait(self, sequence: Sequence) -> None:
        request = sequence.request.request
        self._queue.push(request.tenant_id, request.priority, sequence.request.arrival, sequence)
        if sequence.request.adapter is not None:
            self.slot_turns.enter(sequence.request.adapter.digest, sequence.request.adapter.num_pages)

    def _stop_waiting(self, sequence: Sequence) -> None:
        """Nothing happens to a choice that waits for the first one's prompt."""
        was_waiting = self._queue.remove(sequence.request.request.tenant_id, sequence)
        if was_waiting and sequence.request.adapter is not None:
            self.slot_turns.leave(sequence.request.adapter.digest)

    # A step's plan

    def schedule(self) -> StepPlan:
        """Take blocks and slots for one step. The plan is empty only when nothing waits or runs."""
        self._turn_slots()
        num_decodes = sum(1 for sequence in self._running if sequence.num_uncomputed_tokens == 1)
        step = _Step(self._budget.of_step(num_decodes))
        num_preemptions = self.counters.num_preemptions
        self._continue_running(step)
        if self.counters.num_preemptions == num_preemptions:
            self._start_waiting(step)
        return self._plan(step)

    def _plan(self, step: _Step) -> StepPlan:
        chunks: list[Chunk] = []
        num_mask_rows = 0
        for sequence, num_tokens in step.num_tokens.items():
            mask_row = None
            if sequence.matcher and num_tokens == sequence.num_uncomputed_tokens:
                mask_row, num_mask_rows = num_mask_rows, num_mask_rows + 1
            chunks.append(Chunk(sequence, sequence.num_computed_tokens, num_tokens, mask_row))
        return StepPlan(tuple(chunks), num_mask_rows)

    def _turn_slots(self) -> None:
        for sequence in self.slot_turns.begin_step(self.counters.num_steps, self._running):
            self._stop_running(sequence)
            self._suspended[sequence] = None
            self._wait(sequence)
        self.slot_turns.settle()

    def _continue_running(self, step: _Step) -> None:
        """Give every running sequence its part of the budget, decodes first, preempting where blocks run out."""
        for sequence in sorted(self._running, key=lambda sequence: sequence.num_uncomputed_tokens > 1):
            num_tokens = step.affords(sequence)
            if num_tokens and sequence in self._running and self._grow(sequence, num_tokens, step):
                step.add(sequence, num_tokens)

    def _grow(self, sequence: Sequence, num_tokens: int, step: _Step) -> bool:
        """Extend the block table over the tokens. Where no block is free others are preempted, at last the sequence itself (False)."""
        num_needed = _num_blocks(sequence.num_computed_tokens + num_tokens) - len(sequence.blocks)
        while num_needed > self._blocks.num_free:
            if self._suspended:
                self._preempt_last_suspended()
                continue
            victim = max(self._running, key=self._preemption_order)
            step.drop(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        if num_needed > 0:
            sequence.blocks.extend(self._blocks.allocate(num_needed))
        return True

    def _preemption_order(self, sequence: Sequence) -> tuple[float, int, int]:
        request = sequence.request.request
        return self._queue.virtual_time(request.tenant_id), request.priority, self._running[sequence]

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self._lose_blocks(sequence)
        self._wait(sequence)
        self.counters.num_preemptions += 1

    def _preempt_last_suspended(self, but: Sequence | None = None) -> None:
        """It goes on waiting where it is."""
        victim = max((each for each in self._suspended if each is not but), key=self._waiting_order)
        del self._suspended[victim]
        self._lose_blocks(victim)
        self.counters.num_preemptions += 1

    def _waiting_order(self, sequence: Sequence) -> tuple[float, int, int]:
        request = sequence.request.request
        return self._queue.virtual_time(request.tenant_id), request.priority, sequence.request.arrival

    def _start_waiting(self, step: _Step) -> None:
        """Start waiting sequences in fair order. One that lacks a slot is passed over; one that lacks blocks stops the line."""
        without_slot: set[str] = set()
        if not self._has_room(step):
            return
        for sequence in self._queue.in_order():
            digest = sequence.adapter_digest
            if digest in without_slot:
                continue
            if digest is not None and not self.slot_turns.can_take(digest):
                self.slot_turns.pass_over(digest, for_first_token=not sequence.num_output_tokens)
                without_slot.add(digest)
            elif not self._start(sequence, step) or not self._has_room(step):
                return

    def _has_room(self, step: _Step) -> bool:
        return step.num_left > 0 and len(self._running) < self._max_num_seqs

    def _start(self, sequence: Sequence, step: _Step) -> bool:
        """Take slot and blocks together, or nothing (False)."""
        if not self._take_blocks(sequence):
            return False
        self._stop_waiting(sequence)
        self._suspended.pop(sequence, None)
        if (adapter := sequence.request.adapter) is not None:
            sequence.slot = self.slot_turns.take(adapter.digest, adapter.num_pages)
            sequence.pages = self._slots.pages_of(sequence.slot)
        sequence.num_tokens_at_start = len(sequence.token_ids)
        self._running[sequence] = self._num_starts
        self._num_starts += 1
        self._count_start(sequence)
        step.add(sequence, step.affords(sequence))
        return True

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Hold blocks for every token known, in addition to those that a suspended sequence has, or none (False)."""
        cached = [] if sequence in self._suspended else self._blocks.match(self._readable_keys(sequence))
        self._blocks.hold(cached)
        num_new = _num_blocks(len(sequence.token_ids)) - len(sequence.blocks) - len(cached)
        if not self._make_room(sequence, num_new):
            self._blocks.release(cached)
            return False
        sequence.blocks.extend(cached + self._blocks.allocate(num_new))
        sequence.num_computed_tokens += len(cached) * BLOCK_SIZE
        return True

    def _make_room(self, sequence: Sequence, num_blocks: int) -> bool:
        """Have so many blocks free, and one for every running sequence to grow into; where that is enough, at the cost of the suspended."""
        num_blocks += len(self._running)
        if num_blocks <= self._blocks.num_free:
            return True
        tables = [each.blocks.ids for each in self._suspended if each is not sequence]
        if num_blocks > self._blocks.num_free + self._blocks.num_held_only_by(tables):
            return False
        while num_blocks > self._blocks.num_free:
            self._preempt_last_suspended(but=sequence)
        return True

    def _readable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of blocks the sequence may take from the cache. At least one token is left to compute, for its logits."""
        state = sequence.request
        if sequence.index == 0 and state.wants_prompt_logprobs:
            return []
        return sequence.block_keys[: (len(sequence.token_ids) - 1) // BLOCK_SIZE]

    def _count_start(self, sequence: Sequence) -> None:
        state = sequence.request
        if sequence.index == 0 and state.num_cached_tokens is None:
            state.num_cached_tokens = sequence.num_computed_tokens
            self.counters.num_prompt_tokens += len(state.request.prompt_token_ids)
            self.counters.num_cached_tokens += state.num_cached_tokens

    def _stop_running(self, sequence: Sequence) -> None:
        """The slot returns, the blocks stay."""
        del self._running[sequence]
        if sequence.request.adapter is not None:
            self.slot_turns.give_back(sequence.request.adapter.digest)
            sequence.slot, sequence.pages = None, ()

    def _lose_blocks(self, sequence: Sequence) -> None:
        self._blocks.release(sequence.blocks.ids)
        sequence.blocks = BlockTable()
        sequence.num_computed_tokens = 0

    # What a step gave

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Advance every sequence of the plan by the result, end those that are done, and collect the outputs."""
        self.counters.num_steps += 1
        for chunk, sampled, logprobs in zip(plan.chunks, result.sampled, result.prompt_logprobs, strict=True):
            sequence = chunk.sequence
            if sequence.finished:
                continue  # another choice of the request failed in this step
            self._queue.charge(sequence.request.request.tenant_id, chunk.num_tokens)
            self._advance(sequence, chunk.num_tokens)
            if chunk.wants_prompt_logprobs:
                collect_prompt_logprobs(chunk, logprobs)
            if sampled is not None:
                self._append(sequence, sampled)

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens as computed and publish the blocks they filled."""
        num_full_before = sequence.num_computed_tokens // BLOCK_SIZE
        sequence.num_computed_tokens += num_tokens
        for index in range(num_full_before, sequence.num_computed_tokens // BLOCK_SIZE):
            self._blocks.publish(sequence.blocks.ids[index], sequence.block_keys[index])

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        state = sequence.request
        if sampled.error is not None:
            self._end(state, "failed", sampled.error)
            return
        sequence.append(sampled.token_id)
        self.counters.num_completion_tokens += 1
        try:
            outcome = judge(sequence, sampled.token_id, self._max_model_len)
        except (EngineFailed, GrammarTooComplex) as error:
            self._end(state, "failed", error.to_failure())
            return
        self._outputs.deltas.append(token_delta(sequence, sampled, outcome))
        if outcome.finish_reason is not None:
            self._finish(sequence)
        if sequence.index == 0 and sequence.num_output_tokens == 1:
            for sibling in state.sequences[1:]:
                self._wait(sibling)

    # Ends

    def _finish(self, sequence: Sequence) -> None:
        self._retire(sequence)
        if all(other.finished for other in sequence.request.sequences):
            self._conclude(sequence.request, "finished")

    def _end(self, state: RequestState, end: EndKind, failure: Failure | None = None) -> None:
        for sequence in state.sequences:
            if not sequence.finished:
                self._retire(sequence)
        self._conclude(state, end, failure)

    def _retire(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._stop_running(sequence)
        else:
            self._stop_waiting(sequence)
        self._suspended.pop(sequence, None)
        self._lose_blocks(sequence)
        self._queue.leave(sequence.request.request.tenant_id)
        sequence.finished = True
        sequence.matcher = None

    def _conclude(self, state: RequestState, end: EndKind, failure: Failure | None = None) -> None:
        del self._requests[state.request.id]
        self._outputs.ends.append(
            RequestEnd(
                request_id=state.request.id,
                end=end,
                num_prompt_tokens=len(state.request.prompt_token_ids),
                num_cached_tokens=state.num_cached_tokens or 0,
                num_completion_tokens=state.num_completion_tokens,
                failure=failure,
            )
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, slots and sequences agree. For tests."""
        self._blocks.check_integrity(sequence.blocks.ids for sequence in (*self._running, *self._suspended))
        held = {sequence.adapter_digest for sequence in self._running if sequence.adapter_digest}
        waiting = Counter(sequence.adapter_digest for sequence in self._queue if sequence.adapter_digest)
        self.slot_turns.check_integrity(held, waiting)
        for sequence in (*self._running, *self._suspended):
            assert len(sequence.blocks) >= _num_blocks(sequence.num_computed_tokens)
            assert (sequence.slot is not None) == (sequence in self._running and sequence.request.adapter is not None)
            assert sequence.slot is None or self._slots.digest_of(sequence.slot) == sequence.adapter_digest


def _num_before(sequence: Sequence) -> int:
    """Tokens whose keys cost a step more than it would take without prompts: a decode's own are no extra."""
    return sequence.num_computed_tokens if sequence.num_uncomputed_tokens > 1 else 0


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
