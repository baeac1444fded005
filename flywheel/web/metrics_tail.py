"""The measurements of rounds, read on from where the last reading stopped.

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

KEPT_ROUNDS: Final = 24
HEAD_BYTES: Final = 256
"""Bytes at the beginning of a file by which it is recognised; they have the time of its first line."""
CHUNK_BYTES: Final = 1 << 20
FIGURES: Final = (
    "reward_mean", "reward_std", "loss", "grad_norm", "entropy", "kl", "logprob_gap", "completion_tokens_mean",
    "truncated_share", "rollouts", "groups", "groups_with_spread", "groups_replaced", "missed", "undecided",
    "trained_tokens", "tokens_per_second", "learning_rate", "turns_mean",
)  # fmt: skip
"""Numbers of a step that are kept as they are; `seconds` and `tools` are added by part."""
PHASES: Final = get_args(RoundPhase)
PARTS: Final = ("generate", "grade", "sync", "train")
TOOL_FIGURES: Final = ("hit_rate", "call_share", "miss_share")


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
            found = orjson.loads(line)
            kind = found.get("event")
            if kind == "phase" and found["phase"] not in PHASES:
                self.unreadable += 1
            elif kind == "phase":
                self.phases.append(Phase(str(found["phase"]), str(found["at"])))
            elif kind == "step":
                self._add_step(int(found["step"]), found)
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
            self.unreadable += 1

    def _add_step(self, step: int, found: Mapping[str, Any]) -> None:
        numbers = _numbers(found)
        self.planned = int(found.get("steps") or 0)
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


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a step by name; those that are no number are left out."""
    seconds, tools = (_mapping(found.get(name)) for name in ("seconds", "tools"))
    given = {
        **{name: found.get(name) for name in FIGURES},
        **{f"seconds.{name}": seconds.get(name) for name in PARTS},
        **{f"tools.{name}": tools.get(name) for name in TOOL_FIGURES},
    }
    numbers = {
        name: float(value)
        for name, value in given.items()
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
