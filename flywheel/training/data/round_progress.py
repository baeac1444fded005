"""What a running round reports: `progress.json`, the lines of `metrics.jsonl`.

The worker writes them; the daemon, commands and pages read them.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from flywheel.records.round import METRICS_FILE, Frozen
from flywheel.system.files import append_jsonl, write_atomic
from flywheel.system.terminal import duration

WRITE_SECONDS: Final = 1.0
"""Minimum interval between replacements of the file while only rollouts are counted."""


class Meter:
    """Thread-safe: one thread counts rollouts, others report pauses."""

    def __init__(self, directory: Path, *, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = directory / PROGRESS_FILE
        self._clock = clock
        self._lock = threading.Lock()
        self._now = RoundProgress(phase="starting", steps=steps)
        self._written = float("-inf")
        self._began = self._batch_began = clock()
        self._tokens = 0
        self._planned = 0
        self._pause_began: float | None = None
        self._step_seconds: list[float] = []

    def enter(self, phase: Phase, rollouts: int = 0, **known: Any) -> None:
        """Start a phase. `rollouts` is the number per step, or of the whole phase; `known` is the state before."""
        with self._lock:
            self._began, self._planned, self._step_seconds = self._clock(), rollouts, []
            before = {"steps": self._now.steps, "paused": self._now.paused, **known}
            self._now = RoundProgress(phase=phase, rollouts_planned=rollouts, **before)
            self._set()

    def begin(self, rollouts: int = 0) -> None:
        """A batch of rollouts was requested from the engines, perhaps more than were planned."""
        with self._lock:
            self._batch_began, self._tokens = self._clock(), 0
            planned = max(self._now.rollouts_planned, self._now.rollouts + rollouts)
            self._now = self._now.model_copy(update={"rollouts_planned": planned})

    def completed(self, tokens: int) -> None:
        """One rollout is complete."""
        with self._lock:
            self._tokens += tokens
            seconds = self._clock() - self._batch_began
            rate = self._tokens / seconds if seconds > 0 else None
            # Rate-limited: a thousand rollouts must not write a thousand files.
            seldom = self._clock() - self._written < WRITE_SECONDS
            self._set(write=not seldom, rollouts=self._now.rollouts + 1, tokens_per_second=rate)

    def generated(self) -> None:
        """All rollouts are complete or have failed."""
        with self._lock:
            self._set()

    def stepped(self, step: int, reward: float | None) -> None:
        """A step is complete. `step` counts from 1."""
        with self._lock:
            now = self._clock()
            self._step_seconds.append(now - self._began)
            self._began = now
            first = self._now.reward_first if step > 1 else reward
            self._set(step=step, rollouts=0, rollouts_planned=self._planned, reward_first=first, reward=reward)

    def pause(self, why: str) -> None:
        """The round is paused for this reason; "" when it resumes."""
        with self._lock:
            if bool(why) == (self._pause_began is not None):
                return
            now = self._clock()
            if self._pause_began is not None:
                # Pauses are not part of the duration of a step.
                self._began += now - self._pause_began
                self._pause_began = None
            else:
                self._pause_began = now
            self._set(paused=why)

    def _set(self, *, write: bool = True, **changes: Any) -> None:
        self._now = self._now.model_copy(update=changes)
        if not write:
            return
        self._written = self._clock()
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        whole = self._now.model_copy(update={"seconds_left": self._seconds_left(), "updated_at": at})
        write_atomic(self._path, whole.model_dump_json().encode())

    def _seconds_left(self) -> float | None:
        progress, gone = self._now, self._clock() - self._began
        if progress.phase == "evaluating" and progress.rollouts:
            return round((progress.rollouts_planned - progress.rollouts) * gone / progress.rollouts, 1)
        if progress.phase != "training" or not self._step_seconds:
            return None
        left = (progress.steps - progress.step) * statistics.fmean(self._step_seconds) - gone
        return round(max(0.0, left), 1)


PROGRESS_FILE: Final = "progress.json"

Phase = Literal["starting", "training", "evaluating"]


class RoundProgress(Frozen):
    """A snapshot.

    `step` counts finished steps. `rollouts` of `rollouts_planned` are those of the current step, or of the
    comparison. `reward` is the mean of the last finished step. `tokens_per_second` is the generation rate of the
    current or the last batch. `paused` says what the round waits for, and is empty while it runs.
    """

    phase: Phase
    step: int = 0
    steps: int = 0
    rollouts: int = 0
    rollouts_planned: int = 0
    reward_first: float | None = None
    reward: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    paused: str = ""
    updated_at: str = ""

    @property
    def summary(self) -> str:
        """The snapshot in one line."""
        parts: list[str] = [self.phase]
        if self.phase != "starting":
            # While training, the number of the current step.
            step = min(self.step + 1, self.steps) if self.phase == "training" else self.step
            if self.steps:
                parts.append(f"step {step} of {self.steps}")
            if self.rollouts_planned:
                parts.append(f"{self.rollouts:,} of {self.rollouts_planned:,} rollouts")
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"about {duration(self.seconds_left)} left")
        if self.paused:
            parts.append(f"paused: {self.paused}")
        return ", ".join(parts)


def progress_of(round_dir: Path) -> RoundProgress | None:
    """What the worker wrote last; None if it has not written yet, or another version wrote it."""
    with contextlib.suppress(OSError, ValidationError):
        return RoundProgress.model_validate_json((round_dir / PROGRESS_FILE).read_bytes())
    return None


class Metrics:
    """The metrics file of one round."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / METRICS_FILE
        self._known = {(line.get("stage"), line["step"]) for line in read_steps(directory)}

    def phase(self, phase: Phase, **figures: Any) -> None:
        self._append({"event": "phase", "phase": phase, **figures})

    def step(self, step: int, steps: int, figures: dict[str, Any]) -> None:
        """`step` counts from 1. One of an earlier worker keeps its line: only that knows how long rollouts took."""
        if (figures.get("stage"), step) in self._known:
            return
        self._append({"event": "step", "step": step, "steps": steps, **figures})

    def remove(self, stage: str, behind: int) -> None:
        """Remove the lines of a stage's steps behind a number: their rollouts were removed, and are made anew."""
        gone = {each for each in self._known if each[0] == stage and each[1] > behind}
        if gone:
            lines = self.path.read_bytes().splitlines(keepends=True)
            found = ((line, _measured(line)) for line in lines)
            write_atomic(
                self.path, b"".join(line for line, of in found if (of.get("stage"), of.get("step")) not in gone)
            )
            self._known -= gone

    def _append(self, line: dict[str, Any]) -> None:
        append_jsonl(self.path, [{**_finite(line), "at": datetime.now(UTC).isoformat()}])


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """The lines of steps in the metrics file of a round."""
    lines = read_metrics(directory)
    return [line for line in lines if line.get("event") == "step" and isinstance(line.get("step"), int)]


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of the metrics file of a round, without those that were not written whole."""
    with contextlib.suppress(FileNotFoundError):
        return list(filter(None, map(_measured, (directory / METRICS_FILE).read_bytes().splitlines())))
    return []


def _measured(line: bytes) -> dict[str, Any]:
    """A line of the metrics; empty if it was not written whole."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _finite(value: Any) -> Any:
    """JSON has no NaN: a figure that is not a number is null. Floats have seven significant digits."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
