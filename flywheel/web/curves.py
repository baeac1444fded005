"""The curves of a round: the figures of its steps in `metrics.jsonl`, and their charts.

The file grows by a line per step. A second attempt of a round begins a new one; a person may remove it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import orjson

from flywheel.records.round import METRICS_FILE
from flywheel.training.data.round_progress import Phase
from flywheel.training.data.step_figures import PARTS

KEPT_FILES: Final = 24
PHASES: Final = get_args(Phase)
SPARKLINE_WIDTH: Final = 300
SPARKLINE_HEIGHT: Final = 100
MOST_POINTS: Final = 200
"""Points of a sparkline."""


@dataclass(slots=True)
class Curves:
    """The figures of each step, as lists of the length of `steps`; a figure that a step lacks is NaN.

    Attributes:
        figures: By name: `loss`, `seconds.generate`, and all other numbers of a step.
        phases: The phases of the worker, each with when it began (UTC, ISO 8601).
        planned: Steps that the round will have, as its last line says.
        unreadable: Complete lines that are no measurements.
    """

    steps: list[int] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    phases: list[tuple[str, str]] = field(default_factory=list)
    planned: int = 0
    unreadable: int = 0

    def last(self, name: str) -> float | None:
        """The figure of the last step; None if it lacks it."""
        return self.at(name, -1) if self.steps else None

    def at(self, name: str, place: int) -> float | None:
        values = self.figures.get(name)
        return None if values is None or isnan(values[place]) else values[place]


def curves_in(directory: Path) -> Curves:
    """What is in the round's file now, without an unfinished last line. Not to be changed."""
    path = directory / METRICS_FILE
    try:
        now = path.stat()
        return _read(path, now.st_ino, now.st_mtime_ns, now.st_size)
    except OSError:
        return Curves()


@lru_cache(KEPT_FILES)
def _read(path: Path, *_version: int) -> Curves:
    """A file is read again when it has changed."""
    found = Curves()
    steps: dict[int, dict[str, float]] = {}
    for line in filter(None, path.read_bytes().split(b"\n")[:-1]):
        try:
            event = orjson.loads(line)
            if event.get("event") == "phase":
                found.phases.append((PHASES[PHASES.index(event["phase"])], str(event["at"])))
            elif event.get("event") == "step":
                if not isinstance(step := event["step"], int):
                    raise TypeError(step)
                found.planned = int(event.get("steps") or 0)
                # A step that is written again replaces what came after it.
                while steps and next(reversed(steps)) >= step:
                    steps.popitem()
                steps[step] = dict(_numbers(event))
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            found.unreadable += 1
    found.steps = list(steps)
    for figures in steps.values():
        if figures.get("groups"):
            figures["spread_share"] = figures.get("groups_with_spread", nan) / figures["groups"]
    names = dict.fromkeys(chain.from_iterable(steps.values()))
    found.figures = {name: [each.get(name, nan) for each in steps.values()] for name in names}
    return found


def _numbers(event: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The figures of a step by name."""
    for name, value in event.items():
        if isinstance(value, dict) and not prefix:
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            yield prefix + name, float(value)


class Chart(NamedTuple):
    """A chart of one or more figures by step. `series` has the label of each; shares have an axis from 0 to 1. The
    figure `spread` is drawn as a band around the first one."""

    id: str
    title: str
    unit: str
    series: Mapping[str, str]
    about: str
    spread: str = ""

    @property
    def is_share(self) -> bool:
        return self.unit.startswith(("share", "0 to 1"))


CHARTS: Final = (
    Chart("reward", "Reward", "0 to 1", {"reward_mean": "mean"},
          "Mean reward of a step's rollouts, with one standard deviation.", "reward_std"),
    Chart("spread", "Groups with spread", "share of groups", {"spread_share": "with spread"},
          "Groups whose rewards differ: only they give a gradient."),
    Chart("loss", "Loss", "", {"loss": "loss"}, "The loss of the update."),
    Chart("gradient", "Gradient norm", "", {"grad_norm": "norm"}, "The norm of the gradient before it is clipped."),
    Chart("entropy", "Entropy", "nats", {"entropy": "entropy"}, "Mean entropy of the trained tokens."),
    Chart("kl", "KL divergence", "nats", {"kl": "KL"},
          "From the adapter that the round began with; only with training.beta."),
    Chart("gap", "Log-probability gap", "nats", {"logprob_gap": "gap"},
          "Mean difference of trainer and engine over the trained tokens."),
    Chart("length", "Length", "tokens", {"completion_tokens_mean": "mean"},
          "Mean number of generated tokens of a rollout."),
    Chart("truncation", "Truncation", "share of rollouts", {"truncated_share": "truncated"},
          "Rollouts that ended at the limit of tokens."),
    Chart("seconds", "Time of a step", "seconds", {f"seconds.{name}": name for name in PARTS},
          "Seconds of each part of a step."),
    Chart("tools", "Recorded tools", "share", {"tools.hit_rate": "hits", "tools.miss_share": "rollouts with a miss"},
          "Calls that a recording answered, and rollouts that ended by a call without one."),
)  # fmt: skip


def charts_of(curves: Curves) -> list[Chart]:
    """The charts for which the round has figures."""
    with_values = {name for name, values in curves.figures.items() if not all(map(isnan, values))}
    return [chart for chart in CHARTS if with_values & chart.series.keys()]


def columns(curves: Curves) -> dict[str, tuple[str, str]]:
    """The columns of the table of steps: the figures of the round, each with its title and unit."""
    known = {
        figure: (chart.title if len(chart.series) == 1 else label.capitalize(), chart.unit)
        for chart in CHARTS
        for figure, label in chart.series.items()
    }
    titles = {"reward_std": "Deviation", "rollouts": "Rollouts", "tokens_per_second": "Tokens a second"}
    known |= {figure: (title, "") for figure, title in titles.items()}
    return {figure: known[figure] for figure in known if figure in curves.figures}


def sparkline(curves: Curves) -> str:
    """The mean reward by step, from 0 to 1, as an SVG path with gaps where there is no value; empty without one."""
    rewards = curves.figures.get("reward_mean")
    if not rewards:
        return ""
    first, last = curves.steps[0], max(curves.steps[-1], curves.planned)
    apart = max(1, -(-len(rewards) // MOST_POINTS))
    parts, is_down = [], False
    for place in sorted({*range(0, len(rewards), apart), len(rewards) - 1}):
        if is_value := not isnan(rewards[place]):
            x = SPARKLINE_WIDTH * (curves.steps[place] - first) / max(1, last - first)
            parts.append(f"{'L' if is_down else 'M'}{x:.1f} {SPARKLINE_HEIGHT * (1 - rewards[place]):.1f}")
        is_down = is_value
    # A line of one point is seen by its round end.
    return "".join(parts) + ("h0.1" if len(parts) == 1 else "")


def figures_by_step(curves: Curves) -> dict[str, Any]:
    """The figures of the charts, to six digits, for the script that draws."""
    drawn = {figure for chart in CHARTS for figure in (*chart.series, chart.spread)}
    figures = {
        name: [None if isnan(value) else float(f"{value:.6g}") for value in values]
        for name, values in curves.figures.items()
        if name in drawn
    }
    return {"steps": curves.steps, "figures": figures}
