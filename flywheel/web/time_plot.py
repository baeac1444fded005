"""Geometry of shares over time: a line with intervals for each series, and marks on the axis of time.

The template draws it; numbers are in units of the drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from flywheel.store.views.acceptance import AcceptancePeriod

WIDTH: Final = 900
HEIGHT: Final = 240
LEFT: Final = 46
RIGHT: Final = 12
TOP: Final = 22
BOTTOM: Final = 26
TICKS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
SERIES: Final = 6
"""So many series have a colour and a sign of their own; further ones begin again."""


@dataclass(frozen=True, slots=True)
class Point:
    """`y`, `low` and `high` are heights from the top; `period` is what is drawn."""

    x: float
    y: float
    low: float
    high: float
    period: AcceptancePeriod


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    kind: int
    points: list[Point]

    @property
    def line(self) -> str:
        """The `points` of a polyline."""
        return " ".join(f"{each.x},{each.y}" for each in self.points)


@dataclass(frozen=True, slots=True)
class TimePlot:
    """`times` are ticks of the axis and `marks` what is marked on it, each with its place and its text."""

    series: list[Series]
    times: list[tuple[float, str]]
    marks: list[tuple[float, str]]


def height_of(share: float) -> float:
    return round(TOP + (1 - share) * (HEIGHT - TOP - BOTTOM), 1)


def time_plot(periods: Sequence[AcceptancePeriod], marks: Sequence[tuple[datetime, str]]) -> TimePlot | None:
    """The plot of these periods; None without any. Marks before the first period are drawn at its begin."""
    if not periods:
        return None
    begin, end = min(each.begin for each in periods), max(each.end for each in periods)
    span = (end - begin) / timedelta(seconds=1)

    def place(at: datetime) -> float:
        share = (min(max(at, begin), end) - begin) / timedelta(seconds=1) / span
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    names = list(dict.fromkeys(each.adapter for each in periods))
    series = [
        Series(
            name,
            number % SERIES,
            [
                Point(
                    place(each.begin + (each.end - each.begin) / 2),
                    height_of(each.share), height_of(each.lower), height_of(each.upper), each,
                )
                for each in periods
                if each.adapter == name
            ],
        )
        for number, name in enumerate(names)
    ]  # fmt: skip
    form = "%m-%d %H:%M" if end - begin < timedelta(days=3) else "%Y-%m-%d"
    times = [(begin + share * (end - begin) / 4) for share in range(5)]
    return TimePlot(
        series, [(place(at), at.strftime(form)) for at in times], [(place(at), text) for at, text in marks]
    )
