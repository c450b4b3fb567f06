"""How many threads a forward pass gets, by what it got of the cores."""

from __future__ import annotations

import itertools

import pytest

_native = pytest.importorskip("loramux.kernels.cpu._native")

PASS_S = 0.02


class Passes:
    """Passes one after another, of threads that have their cores for a share of the time."""

    def __init__(self, most: int) -> None:
        self.size = _native.TeamSize(most)
        self.now = 0.0

    def run(self, seconds: float, share: float) -> list[int]:
        """-> the number of threads of each"""
        sizes = []
        end = self.now + seconds
        while self.now < end:
            sizes.append(self.size.choose(self.now))
            self.now += PASS_S
            self.size.observe(self.now, PASS_S, PASS_S * (sizes[-1] * share if sizes[-1] > 1 else 1.0))
        return sizes


def test_all_threads_are_used_while_they_have_their_cores() -> None:
    assert set(Passes(2).run(5, share=0.9)) == {2}
    assert set(Passes(1).run(5, share=0.9)) == {1}


def test_a_team_without_its_cores_is_made_smaller_within_a_few_passes() -> None:
    sizes = Passes(2).run(0.9, share=0.45)
    assert sizes[:5] == [2] * 5 and set(sizes[7:]) == {1}


def test_a_short_disturbance_changes_nothing() -> None:
    passes = Passes(2)
    passes.run(0.06, share=0.8)
    passes.run(0.02, share=0.3)
    assert set(passes.run(1, share=0.95)) == {2}


def test_the_whole_team_is_tried_again_after_longer_and_longer_pauses() -> None:
    sizes = Passes(2).run(40, share=0.45)
    tries = [index * PASS_S for index in range(1, len(sizes)) if sizes[index] == 2 and sizes[index - 1] == 1]
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert tries[0] == pytest.approx(1.1, abs=0.1)
    assert pauses[0] == pytest.approx(2.1, abs=0.1) and pauses[1] == pytest.approx(4.1, abs=0.1)
    assert {round(pause) for pause in pauses[2:]} == {8}


def test_a_team_is_whole_again_once_the_cores_are_free() -> None:
    passes = Passes(2)
    passes.run(0.5, share=0.45)
    assert set(passes.run(3, share=0.95)[-50:]) == {2}
    assert 1 in passes.run(0.5, share=0.45)
    assert passes.run(1.2, share=0.95)[-1] == 2, "the pauses begin anew"


def test_a_large_team_loses_a_thread_at_a_time() -> None:
    passes = Passes(4)
    sizes = passes.run(0.9, share=0.6)
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {4, 3, 2}
