"""Plots: shares over time, which a script draws, and the geometry of forest plots and of paired dots in units of the
drawing, which templates draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from flywheel.records.round import Score
from flywheel.store.views.acceptance import SharePeriod

SERIES: Final = 6
"""So many series have a colour and a sign of their own; further ones begin again."""
AXIS_WIDTH: Final = 240
AXIS_MARGIN: Final = 8
"""Room left and right of the axis, for the ends of intervals."""
_STEPS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_MOST_TICKS: Final = 5
DOTS_HEIGHT: Final = 160
DOTS_TOP: Final = 22
DOTS_LEFT: Final = 34
_LEAST_BETWEEN, _MOST_BETWEEN, _USUAL_WIDTH = 12, 26, 680


class TimePlot(NamedTuple):
    """Shares over time, a line for each name, and what is marked on the axis of time, each with its text."""

    periods: Sequence[SharePeriod]
    marks: Sequence[tuple[datetime, str]]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(each.name for each in self.periods))

    @property
    def data(self) -> dict[str, Any]:
        """What the script draws: times in seconds with the ends of their axis, and by name the shares with their
        bounds, null without one."""
        times = sorted({_middle(each) for each in self.periods})
        shares = {(each.name, _middle(each)): (each.share.value, *each.share.interval) for each in self.periods}
        nothing = (None, None, None)
        series = [list(zip(*(shares.get((name, at), nothing) for at in times), strict=True)) for name in self.names]
        ends = min(each.begin for each in self.periods), max(each.end for each in self.periods)
        return {
            "times": times,
            "ends": [at.timestamp() for at in ends],
            "series": series,
            "marks": [(at.timestamp(), name) for at, name in self.marks],
        }


def _middle(period: SharePeriod) -> float:
    return (period.begin + (period.end - period.begin) / 2).timestamp()


@dataclass(frozen=True, slots=True)
class Axis:
    """A horizontal axis from `low` to `high`, which has ticks at multiples of `step`."""

    low: float
    high: float
    step: float

    def at(self, value: float) -> float:
        """Where a value stands; at the end of the axis if it is beyond."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(AXIS_MARGIN + share * (AXIS_WIDTH - 2 * AXIS_MARGIN), 1)

    @property
    def ticks(self) -> list[float]:
        first, last = (round(value / self.step) for value in (self.low, self.high))
        return [round(number * self.step, 2) + 0.0 for number in range(first, last + 1)]


SHARES: Final = Axis(0.0, 1.0, 0.25)
"""The axis of shares."""


def axis_of(values: Iterable[float]) -> Axis:
    """The shortest axis of a few ticks that has all values and 0."""
    ends = [0.0, *values]
    low, high = min(ends), max(ends)
    if high - low < _STEPS[0]:
        low, high = low - 0.1, high + 0.1
    for step in _STEPS:
        first, last = math.floor(round(low / step, 6)), math.ceil(round(high / step, 6))
        if last - first < _MOST_TICKS:
            break
    return Axis(round(first * step, 2), round(last * step, 2), step)


def result_of(lower: float, upper: float) -> str:
    """What the interval of a gain shows: `better`, `worse` or `open`."""
    return "better" if lower > 0 else "worse" if upper < 0 else "open"


class Dots(NamedTuple):
    """The scores of a task: `x` is its place, `candidate` and `deployed` are heights from the top. `kind` says how
    the candidate compares: `gain`, `loss` or `same`."""

    score: Score
    x: float
    candidate: float
    deployed: float
    kind: str


def difference_of(score: Score) -> float:
    """The candidate's score minus the deployed one's, without floating-point noise."""
    return round(score.candidate - score.deployed, 9)


def ranked(scores: Sequence[Score]) -> list[Score]:
    """The scores by their difference, the largest gain first."""
    return sorted(scores, key=lambda score: (-difference_of(score), score.task_id))


def paired_dots(scores: Sequence[Score]) -> list[Dots]:
    """The dots of all tasks, which are ranked, the largest loss on the left."""

    def height(score: float) -> float:
        return round(DOTS_TOP + (1 - score) * DOTS_HEIGHT, 1)

    found = []
    for number, score in enumerate(reversed(scores)):
        difference, x = difference_of(score), round(DOTS_LEFT + (number + 0.75) * _between(len(scores)), 1)
        kind = "gain" if difference > 0 else "loss" if difference < 0 else "same"
        found.append(Dots(score, x, height(score.candidate), height(score.deployed), kind))
    return found


def dots_width(tasks: int) -> int:
    return DOTS_LEFT + math.ceil((tasks + 1) * _between(tasks))


def _between(tasks: int) -> float:
    """The distance of two tasks: a few fill the usual width."""
    return min(max(_USUAL_WIDTH / (tasks + 1), _LEAST_BETWEEN), _MOST_BETWEEN)
