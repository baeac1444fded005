"""Geometry of forest plots and of paired dots. Templates draw them; numbers are in units of the drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.records.round import Score

WIDTH: Final = 240
MARGIN: Final = 8
"""Room left and right of the axis, for the ends of intervals."""
_STEPS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_MOST_TICKS: Final = 5


@dataclass(frozen=True, slots=True)
class Axis:
    """A horizontal axis from `low` to `high`, which has ticks at multiples of `step`."""

    low: float
    high: float
    step: float

    def at(self, value: float) -> float:
        """Where a value stands; at the end of the axis if it is beyond."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)

    @property
    def ticks(self) -> list[float]:
        first, last = (round(value / self.step) for value in (self.low, self.high))
        return [round(number * self.step, 2) + 0.0 for number in range(first, last + 1)]


def axis_of(values: Iterable[float]) -> Axis:
    """The shortest axis of a few ticks that has all values and 0."""
    found = [0.0, *values]
    low, high = min(found), max(found)
    if high - low < _STEPS[0]:
        low, high = low - 0.1, high + 0.1
    for step in _STEPS:
        first, last = math.floor(round(low / step, 6)), math.ceil(round(high / step, 6))
        if last - first < _MOST_TICKS:
            break
    return Axis(round(first * step, 2), round(last * step, 2), step)


@dataclass(frozen=True, slots=True)
class Dots:
    """The scores of a task: `x` is its place, `candidate` and `deployed` are heights from the top."""

    task_id: str
    x: float
    candidate: float
    deployed: float
    score: Score

    @property
    def kind(self) -> str:
        """How the candidate compares: `gain`, `loss` or `same`."""
        difference = difference_of(self.score)
        return "gain" if difference > 0 else "loss" if difference < 0 else "same"


PLOT_HEIGHT: Final = 160
PLOT_TOP: Final = 8
PLOT_LEFT: Final = 34
_LEAST_BETWEEN, _MOST_BETWEEN, _USUAL_WIDTH = 12, 26, 680


def difference_of(score: Score) -> float:
    """The candidate's score minus the deployed one's, without floating-point noise."""
    return round(score.candidate - score.deployed, 9)


def ranked(scores: Sequence[Score]) -> list[Score]:
    """The scores by their difference, the largest gain first."""
    return sorted(scores, key=lambda score: (-difference_of(score), score.task_id))


def paired_dots(scores: Sequence[Score]) -> list[Dots]:
    """The dots of all tasks, the largest loss on the left."""
    between = _between(len(scores))
    places = (round(PLOT_LEFT + (number + 0.75) * between, 1) for number in range(len(scores)))
    return [
        Dots(score.task_id, place, _height(score.candidate), _height(score.deployed), score)
        for place, score in zip(places, reversed(ranked(scores)), strict=True)
    ]


def plot_width(tasks: int) -> int:
    return PLOT_LEFT + math.ceil((tasks + 1) * _between(tasks))


def _between(tasks: int) -> float:
    """The distance of two tasks: a few fill the usual width."""
    return min(max(_USUAL_WIDTH / (tasks + 1), _LEAST_BETWEEN), _MOST_BETWEEN)


def _height(score: float) -> float:
    return round(PLOT_TOP + (1 - score) * PLOT_HEIGHT, 1)
