"""The curves of a round: which charts there are, and their lines where no script draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Final

from flywheel.web.metrics_tail import PARTS, Curves

WIDTH: Final = 300
HEIGHT: Final = 100
MOST_POINTS: Final = 200
"""Points of a line that no script draws."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of one or more figures by step.

    Attributes:
        series: Name of each figure and its label.
        spread: The figure that is drawn as a band around the first one.
        low: The lower end of the axis, None for that of the data; `high` likewise.
    """

    id: str
    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    about: str
    spread: str = ""
    low: float | None = None
    high: float | None = None


CHARTS: Final = (
    Chart(
        "reward",
        "Reward",
        "0 to 1",
        (("reward_mean", "mean"),),
        "Mean reward of a step's rollouts, with one standard deviation.",
        spread="reward_std",
        low=0,
        high=1,
    ),
    Chart(
        "spread",
        "Groups with spread",
        "share of groups",
        (("spread_share", "with spread"),),
        "Groups whose rewards differ: only they give a gradient.",
        low=0,
        high=1,
    ),
    Chart("loss", "Loss", "", (("loss", "loss"),), "The loss of the update."),
    Chart(
        "gradient",
        "Gradient norm",
        "",
        (("grad_norm", "norm"),),
        "The norm of the gradient before it is clipped.",
        low=0,
    ),
    Chart("entropy", "Entropy", "nats", (("entropy", "entropy"),), "Mean entropy of the trained tokens.", low=0),
    Chart(
        "kl",
        "KL divergence",
        "nats",
        (("kl", "KL"),),
        "From the adapter that the round began with; only with training.beta.",
    ),
    Chart(
        "gap",
        "Log-probability gap",
        "nats",
        (("logprob_gap", "gap"),),
        "Mean difference of trainer and engine over the trained tokens.",
    ),
    Chart(
        "length",
        "Length",
        "tokens",
        (("completion_tokens_mean", "mean"),),
        "Mean number of generated tokens of a rollout.",
        low=0,
    ),
    Chart(
        "truncation",
        "Truncation",
        "share of rollouts",
        (("truncated_share", "truncated"),),
        "Rollouts that ended at the limit of tokens.",
        low=0,
        high=1,
    ),
    Chart(
        "seconds",
        "Time of a step",
        "seconds",
        tuple((f"seconds.{name}", name) for name in PARTS),
        "Seconds of each part of a step.",
        low=0,
    ),
    Chart(
        "tools",
        "Recorded tools",
        "share",
        (("tools.hit_rate", "hits"), ("tools.miss_share", "rollouts with a miss")),
        "Calls that a recording answered, and rollouts that ended by a call without one.",
        low=0,
        high=1,
    ),
)


def charts_of(curves: Curves) -> list[Chart]:
    """The charts for which the round has figures."""
    return [chart for chart in CHARTS if any(_has(curves, name) for name, _ in chart.series)]


def _has(curves: Curves, name: str) -> bool:
    return any(not isnan(value) for value in curves.figures.get(name, ()))


@dataclass(frozen=True, slots=True)
class Picture:
    """The lines of a chart as paths in a box of `WIDTH` and `HEIGHT`, with the ends of its axis."""

    lines: list[tuple[str, str]]
    low: float
    high: float


def picture(chart: Chart, curves: Curves) -> Picture | None:
    """How a chart looks; None without a figure."""
    lines = [(label, _thinned(curves, name)) for name, label in chart.series]
    known = [value for _, points in lines for _, value in points if not isnan(value)]
    if not known:
        return None
    low = min(known) if chart.low is None else chart.low
    high = max(known) if chart.high is None else chart.high
    if high <= low:
        low, high = low - 0.5, low + 0.5
    first, last = curves.steps[0], max(curves.steps[-1], curves.planned)
    across = WIDTH / max(1, last - first)

    def place(step: int, value: float) -> tuple[float, float]:
        return (step - first) * across, HEIGHT * (high - value) / (high - low)

    return Picture([(label, _path([place(*point) for point in points])) for label, points in lines], low, high)


def _thinned(curves: Curves, name: str) -> Sequence[tuple[int, float]]:
    values = curves.figures.get(name)
    if values is None:
        return []
    apart = max(1, -(-len(values) // MOST_POINTS))
    places = sorted({*range(0, len(values), apart), len(values) - 1})
    return [(curves.steps[place], values[place]) for place in places]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """An SVG path, with gaps where there is no value."""
    parts, is_down = [], False
    for x, y in points:
        if isnan(y):
            is_down = False
            continue
        parts.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}")
        is_down = True
    if len(parts) == 1:
        # A line of one point is seen by its round end.
        parts.append("h0.1")
    return "".join(parts)


def figures_by_step(name: str, curves: Curves, begin: int) -> dict[str, Any]:
    """The steps from place `begin` on, for the script that draws."""
    wanted = {figure for chart in CHARTS for figure in (*(one for one, _ in chart.series), chart.spread) if figure}
    return {
        "round": name,
        "file": curves.file,
        "begin": begin,
        "steps": curves.steps[begin:].tolist(),
        "figures": {
            figure: [None if isnan(value) else value for value in curves.figures[figure][begin:]]
            for figure in sorted(wanted & curves.figures.keys())
        },
    }
