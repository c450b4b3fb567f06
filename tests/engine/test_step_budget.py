import pytest

from loramux.engine.prefix import BLOCK_SIZE
from loramux.engine.step_budget import MAX_STRETCH, StepBudget

LINEAR = {size: 0.030 + 0.001 * size for size in (1, 16, 64, 256, 512)}


def test_without_measurements_every_step_has_the_whole_budget() -> None:
    assert [StepBudget(512).of_step(num_decodes) for num_decodes in (0, 1, 300)] == [512, 512, 512]


def test_a_step_without_decodes_has_the_whole_budget() -> None:
    assert StepBudget(512, LINEAR).of_step(0) == 512


@pytest.mark.parametrize("num_decodes", [1, 10, 50, 100])
def test_a_step_with_decodes_stays_within_the_stretch(num_decodes: int) -> None:
    alone = LINEAR[1] + 0.001 * (num_decodes - 1)
    assert StepBudget(512, LINEAR).of_step(num_decodes) == pytest.approx((MAX_STRETCH * alone - 0.030) / 0.001, abs=1)


def test_prompts_get_a_block_at_least_and_never_more_than_the_whole() -> None:
    steep = StepBudget(512, {1: 0.001, 512: 10.0})
    assert steep.of_step(1) == 1 + BLOCK_SIZE
    assert steep.of_step(510) == 512
    assert StepBudget(64, LINEAR).of_step(60) == 64
    assert StepBudget(64, LINEAR).of_step(100) == 64


def test_a_larger_step_measured_faster_counts_as_no_faster() -> None:
    noisy = StepBudget(100, {1: 0.010, 81: 0.030, 100: 0.020})
    assert noisy.of_step(1) == 1 + 60  # where the line from 1 to 81 reaches 0.025


def test_past_the_largest_measured_size_time_goes_on_rising() -> None:
    assert StepBudget(1000, {1: 0.011, 16: 0.026, 64: 0.074}).of_step(64) == pytest.approx((MAX_STRETCH * 0.074 - 0.010) / 0.001, abs=1)


def test_one_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="two"):
        StepBudget(512, {16: 0.01})
