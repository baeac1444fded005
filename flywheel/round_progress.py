"""How far a running round is, as its worker writes it down (`progress.json`) and others read it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final, Literal

from pydantic import ValidationError

from flywheel.round import Frozen
from flywheel.terminal import duration

PROGRESS_FILE: Final = "progress.json"

Phase = Literal["starting", "training", "evaluating"]


class RoundProgress(Frozen):
    """One look at a running round.

    `step` counts the steps that are done. `rollouts` of `rollouts_planned` are those of the step under way, or of the
    comparison. `reward` is the mean of the last step that is done. `tokens_per_second` is what the engines generated
    in the batch under way or in the last one. `paused` says what the round waits for; it is empty while it goes on.
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
        """All of it in one line."""
        parts: list[str] = [self.phase]
        if self.phase != "starting":
            # The step under way, while there is one.
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
    """What the round's worker has last written; None before it has, or when it is of another version."""
    with contextlib.suppress(OSError, ValidationError):
        return RoundProgress.model_validate_json((round_dir / PROGRESS_FILE).read_bytes())
    return None
