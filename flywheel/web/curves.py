"""The curves of a round: the figures of its steps, read on from where the last reading stopped, and their charts.

`metrics.jsonl` grows by a line per step. A second attempt of a round begins a new file; retention keeps it, but a
person may remove it. What was read of the newest rounds is kept as arrays of numbers.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any, Final, get_args

import orjson

from flywheel.records.round import METRICS_FILE
from flywheel.training.data.round_progress import Phase as RoundPhase
from flywheel.training.data.step_figures import PARTS, WORKERS

KEPT_ROUNDS: Final = 24
HEAD_BYTES: Final = 256
"""Bytes at the beginning of a file by which it is recognised; they have the time of its first line."""
CHUNK_BYTES: Final = 1 << 20
FIGURES: Final = (
    "reward_mean", "reward_std", "loss", "grad_norm", "entropy", "kl", "logprob_gap", "completion_tokens_mean",
    "truncated_share", "rollouts", "groups", "groups_with_spread", "missed", "undecided",
    "trained_tokens", "tokens_per_second", "learning_rate", "turns_mean", "overlap",
)  # fmt: skip
"""Numbers of a step that are kept as they are; `seconds`, `busy` and `tools` are added by part."""
PHASES: Final = get_args(RoundPhase)
TOOL_FIGURES: Final = ("hit_rate", "call_share", "miss_share")
SPARKLINE_WIDTH: Final = 300
SPARKLINE_HEIGHT: Final = 100
MOST_POINTS: Final = 200
"""Points of a sparkline."""


@dataclass(slots=True)
class Phase:
    """A phase of a round, and when (UTC, ISO 8601) it began."""

    name: str
    at: str


@dataclass(slots=True)
class Curves:
    """The figures of each step. Arrays have the length of `steps`; a figure that a step lacks is NaN.

    Attributes:
        file: Recognises the file: another attempt of the round has another text. Empty without a file.
        planned: Steps that the round will have, as its last line says.
        unreadable: Complete lines that are no measurements.
    """

    file: str = ""
    steps: array[int] = field(default_factory=lambda: array("q"))
    figures: dict[str, array[float]] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    planned: int = 0
    unreadable: int = 0

    def last(self, name: str) -> float | None:
        """The figure of the last step; None if it lacks it."""
        return self.at(name, -1) if self.steps else None

    def at(self, name: str, place: int) -> float | None:
        values = self.figures.get(name)
        return None if values is None or isnan(values[place]) else values[place]

    def copy(self) -> Curves:
        figures = {name: values[:] for name, values in self.figures.items()}
        return replace(self, steps=self.steps[:], figures=figures, phases=[*self.phases])

    def add(self, line: bytes) -> None:
        """Take a line of the file."""
        try:
            event = orjson.loads(line)
            kind = event.get("event")
            if kind == "phase" and event["phase"] not in PHASES:
                self.unreadable += 1
            elif kind == "phase":
                self.phases.append(Phase(str(event["phase"]), str(event["at"])))
            elif kind == "step":
                self._add_step(int(event["step"]), event)
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
            self.unreadable += 1

    def _add_step(self, step: int, event: Mapping[str, Any]) -> None:
        numbers = _numbers(event)
        self.planned = int(event.get("steps") or 0)
        # A step that is written again replaces what came after it.
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            for values in self.figures.values():
                values.pop()
        for name in numbers.keys() - self.figures.keys():
            self.figures[name] = array("d", [nan]) * len(self.steps)
        self.steps.append(step)
        for name, values in self.figures.items():
            values.append(numbers.get(name, nan))


def _numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a step by name; those that are no number are left out."""
    seconds, busy, tools = (_mapping(event.get(name)) for name in ("seconds", "busy", "tools"))
    values = {
        **{name: event.get(name) for name in FIGURES},
        **{f"seconds.{name}": seconds.get(name) for name in PARTS},
        **{f"busy.{name}": busy.get(name) for name in WORKERS},
        **{f"tools.{name}": tools.get(name) for name in TOOL_FIGURES},
    }
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    }
    if numbers.get("groups") and "groups_with_spread" in numbers:
        numbers["spread_share"] = numbers["groups_with_spread"] / numbers["groups"]
    return numbers


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class _Tail:
    curves: Curves = field(default_factory=Curves)
    offset: int = 0
    head: bytes = b""


class MetricsTails:
    """The measurements of the rounds that were asked for last. Thread-safe."""

    def __init__(self) -> None:
        self._tails: OrderedDict[Path, _Tail] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, directory: Path) -> Curves:
        """What is in the round's file now, without an unfinished last line."""
        with self._lock:
            tail = self._tails.pop(directory, None) or _Tail()
            tail = _read_on(directory / METRICS_FILE, tail)
            self._tails[directory] = tail
            while len(self._tails) > KEPT_ROUNDS:
                self._tails.popitem(last=False)
            return tail.curves.copy()


def _read_on(path: Path, tail: _Tail) -> _Tail:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            size = file.seek(0, 2)
            if size < tail.offset or not head.startswith(tail.head):
                tail = _Tail()
            tail.head = head
            tail.curves.file = blake2b(head.partition(b"\n")[0], digest_size=8).hexdigest()
            file.seek(tail.offset)
            rest = b""
            while block := file.read(CHUNK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    tail.offset += len(line) + 1
                    if line:
                        tail.curves.add(line)
    except OSError:
        return _Tail()
    return tail


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
    with_values = {name for name, values in curves.figures.items() if not all(map(isnan, values))}
    return [chart for chart in CHARTS if any(name in with_values for name, _ in chart.series)]


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


def figures_by_step(name: str, curves: Curves, begin: int) -> dict[str, Any]:
    """The steps from place `begin` on, for the script that draws."""
    drawn = {figure for chart in CHARTS for figure in (*(name for name, _ in chart.series), chart.spread)}
    return {
        "round": name,
        "file": curves.file,
        "begin": begin,
        "steps": curves.steps[begin:].tolist(),
        "figures": {
            figure: [None if isnan(value) else value for value in curves.figures[figure][begin:]]
            for figure in sorted(drawn & curves.figures.keys())
        },
    }
