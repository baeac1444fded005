"""The progress of a running round: its worker writes `progress.json`, the daemon and commands read it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final, Literal

from pydantic import ValidationError

from flywheel.records.round import Frozen
from flywheel.system.terminal import duration

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
            parts.append(f"step {step} of {self.steps}")
            parts.append(f"{self.rollouts:,} of {self.rollouts_planned:,} rollouts")
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if self.tokens_per_second is not None:
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
