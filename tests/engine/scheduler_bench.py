"""A scheduler with its pools and a symbolic runner, checked after every step."""

from __future__ import annotations

from collections import defaultdict

from loramux.engine.block_pool import BlockPool
from loramux.engine.detokenize import TextPiece
from loramux.engine.plan import StepPlan
from loramux.engine.scheduler import Scheduler
from loramux.engine.step_budget import StepBudget, StepTimes
from loramux.engine.types import GenerationRequest, RequestEnd
from loramux.lora.slots import SlotTable
from tests.engine.symbolic import SymbolicRunner, make_state


class LetterText:
    """Token 0 is "a", 1 is "b" ...; nothing is held back."""

    stop_string: str | None = None

    def push(self, token_ids: tuple[int, ...]) -> TextPiece:
        return TextPiece("".join(chr(97 + token) for token in token_ids), None)

    def finish(self) -> str:
        return ""


class Bench:
    """`pages` gives each adapter's, by digest; the pool has `num_pages`."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_slots: int = 2,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 512,
        turn_steps: int = 4,
        num_pages: int | None = None,
        pages: dict[str, int] | None = None,
        times: StepTimes | None = None,
    ) -> None:
        self.blocks = BlockPool(num_blocks)
        self.slots = SlotTable(num_slots, num_pages)
        self.pages = pages or {}
        self.slots.expect(max(self.pages.values(), default=0))
        self.runner = SymbolicRunner()
        self.scheduler = Scheduler(
            self.blocks,
            self.slots,
            max_num_seqs=max_num_seqs,
            budget=StepBudget(budget, times),
            max_model_len=max_model_len,
            text_factory=lambda _: LetterText(),
            slot_turn_steps=turn_steps,
        )
        self.turns = self.scheduler.slot_turns
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.texts: dict[tuple[str, int], str] = defaultdict(str)
        self.finish: dict[tuple[str, int], str] = {}
        self.ends: dict[str, RequestEnd] = {}
        self.first_token_at: dict[str, int] = {}
        """Request id to the number of steps until it had its first token."""
        self.num_steps = 0
        self.budget = budget
        self._arrivals = 0

    def add(self, request: GenerationRequest) -> None:
        num_pages = self.pages.get(request.adapter_digest or "", 0)
        self.scheduler.add(make_state(request, self._arrivals, num_pages))
        self._arrivals += 1

    def step(self) -> StepPlan:
        self.num_steps += 1
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert plan.num_tokens <= self.budget
        assert plan.chunks or not self.scheduler.has_work, "work is there and nothing is planned"
        self.scheduler.apply(plan, self.runner.run(plan))
        self.scheduler.check_integrity()
        self.collect()
        return plan

    def collect(self) -> None:
        outputs = self.scheduler.take_outputs()
        for delta in outputs.deltas:
            key = (delta.request_id, delta.index)
            assert delta.request_id not in self.ends and key not in self.finish, "a delta after the end"
            self.first_token_at.setdefault(delta.request_id, self.num_steps)
            self.tokens[key] += delta.token_ids
            self.texts[key] += delta.text
            if delta.finish_reason:
                self.finish[key] = delta.finish_reason
        for end in outputs.ends:
            assert end.request_id not in self.ends, "two terminal records"
            self.ends[end.request_id] = end

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "a request never ended"
        self.assert_empty()

    def assert_empty(self) -> None:
        assert self.blocks.num_held == 0
        assert self.slots.num_used == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.blocks.check_integrity()
