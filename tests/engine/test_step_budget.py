import pytest

from loramux.engine.prefix import BLOCK_SIZE
from loramux.engine.step_budget import MAX_STRETCH, PROBED_CHUNK, PROBED_CONTEXT, Allowance, StepBudget, StepTimes

TOKEN_S = 0.001
LINEAR = {size: 0.030 + TOKEN_S * size for size in (1, 16, 64, 256, 512)}


def budget(max_num_tokens: int, seconds: dict[int, float], chunk_after_context_s: float = 0.0) -> StepBudget:
    return StepBudget(max_num_tokens, StepTimes(seconds, chunk_after_context_s))


def test_without_measurements_every_step_has_the_whole_budget() -> None:
    assert [StepBudget(512).of_step(num_decodes) for num_decodes in (0, 1, 300)] == [Allowance(512, 0.0)] * 3


def test_a_step_without_decodes_has_the_whole_budget() -> None:
    assert budget(512, LINEAR, 1.0).of_step(0) == Allowance(512, 0.0)


@pytest.mark.parametrize("num_decodes", [1, 10, 50, 100])
def test_a_step_with_decodes_stays_within_the_stretch(num_decodes: int) -> None:
    alone = LINEAR[1] + TOKEN_S * (num_decodes - 1)
    num_tokens = budget(512, LINEAR).of_step(num_decodes).num_tokens
    assert num_tokens == pytest.approx((MAX_STRETCH * alone - 0.030) / TOKEN_S, abs=1)


def test_prompts_get_a_block_at_least_and_never_more_than_the_whole() -> None:
    steep = budget(512, {1: 0.001, 512: 10.0})
    assert steep.of_step(1).num_tokens == 1 + BLOCK_SIZE
    assert steep.of_step(510).num_tokens == 512
    assert budget(64, LINEAR).of_step(60).num_tokens == 64
    assert budget(64, LINEAR).of_step(100).num_tokens == 64


def test_a_larger_step_measured_faster_counts_as_no_faster() -> None:
    noisy = budget(100, {1: 0.010, 81: 0.030, 100: 0.020})
    assert noisy.of_step(1).num_tokens == 1 + 60  # where the line from 1 to 81 reaches 0.025


def test_past_the_largest_measured_size_time_goes_on_rising() -> None:
    allowance = budget(1000, {1: 0.011, 16: 0.026, 64: 0.074}).of_step(64)
    assert allowance.num_tokens == pytest.approx((MAX_STRETCH * 0.074 - 0.010) / TOKEN_S, abs=1)


def test_one_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="two"):
        budget(512, {16: 0.01})


def test_tokens_after_a_context_cost_more_by_what_attending_to_it_takes() -> None:
    doubled = LINEAR[PROBED_CHUNK] + TOKEN_S * PROBED_CHUNK
    allowance = budget(512, LINEAR, doubled).of_step(10)
    assert allowance.cost(100, 0) == 100
    assert allowance.cost(100, PROBED_CONTEXT) == 200
    assert allowance.cost(100, PROBED_CONTEXT // 2) == 150
    assert allowance.affords(100, 0) == 100
    assert allowance.affords(100, PROBED_CONTEXT) == 50


def test_something_is_affordable_while_anything_is_left() -> None:
    allowance = Allowance(40, tokens_per_key=1.0)
    assert [allowance.affords(num_left, 1000) for num_left in (40, 1, 0, -5)] == [1, 1, 0, 0]


def test_a_context_measured_free_or_faster_costs_nothing() -> None:
    assert budget(512, LINEAR, 0.001).of_step(10).tokens_per_key == 0
