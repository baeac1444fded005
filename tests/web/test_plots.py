"""Axes and dots stand where the numbers are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.round import Score
from flywheel.web.plots import (
    AXIS_MARGIN,
    AXIS_WIDTH,
    DOTS_HEIGHT,
    DOTS_TOP,
    axis_of,
    dots_width,
    paired_dots,
    ranked,
)


@given(st.lists(st.floats(-1, 1), max_size=8))
def test_an_axis_has_all_values_and_zero_and_a_few_ticks(values: list[float]) -> None:
    axis = axis_of(values)
    assert axis.low <= min(values, default=0) + 1e-6
    assert axis.high >= max(values, default=0) - 1e-6
    assert 0 in axis.ticks
    assert 2 <= len(axis.ticks) <= 6
    assert (axis.at(axis.low), axis.at(axis.high)) == (AXIS_MARGIN, AXIS_WIDTH - AXIS_MARGIN)
    assert all(AXIS_MARGIN <= axis.at(value) <= AXIS_WIDTH - AXIS_MARGIN for value in values)


def test_ticks_are_round_numbers() -> None:
    assert axis_of([-0.116, 0.519]).ticks == [-0.2, 0.0, 0.2, 0.4, 0.6]
    assert axis_of([]).ticks == [-0.1, -0.05, 0.0, 0.05, 0.1]


def test_paired_dots_begin_with_the_largest_loss() -> None:
    scores = [
        Score(task_id="same", candidate=0.5, deployed=0.5),
        Score(task_id="gain", candidate=1.0, deployed=0.0),
        Score(task_id="loss", candidate=0.25, deployed=0.5),
    ]
    dots = paired_dots(ranked(scores))
    expected = [("loss", "loss"), ("same", "same"), ("gain", "gain")]
    assert [(each.score.task_id, each.kind) for each in dots] == expected
    assert (dots[2].candidate, dots[2].deployed) == (DOTS_TOP, DOTS_TOP + DOTS_HEIGHT)
    assert all(0 < each.x < dots_width(3) for each in dots)
    assert not paired_dots([])
