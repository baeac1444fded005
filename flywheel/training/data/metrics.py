"""`metrics.jsonl`: the metrics of a running round, one fsynced line per event."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from flywheel.records.round import METRICS_FILE
from flywheel.system.files import append_jsonl
from flywheel.training.data.round_progress import Phase
from flywheel.training.data.tensorboard_events import TensorBoardEvents

UPDATE_FIGURES: Final = ("loss", "grad_norm", "learning_rate", "kl")
"""TRL's figures of an update that `metrics.jsonl` has; `kl` only with `training.beta`."""


class Metrics:
    """The metrics file of one round. Its processes write in turn, never at the same time."""

    def __init__(self, directory: Path, tensorboard: Path | None = None) -> None:
        """`tensorboard` is a directory for the numbers of steps as event files."""
        self.path = directory / METRICS_FILE
        self._events = TensorBoardEvents(tensorboard) if tensorboard is not None else None

    def phase(self, phase: Phase, **figures: Any) -> None:
        self._append({"event": "phase", "phase": phase, **figures})

    def step(self, step: int, steps: int, figures: dict[str, Any]) -> None:
        """`step` counts from 1."""
        self._append({"event": "step", "step": step, "steps": steps, **figures})
        if self._events is not None:
            self._events.step(step, figures)

    def _append(self, line: dict[str, Any]) -> None:
        append_jsonl(self.path, [{**_finite(line), "at": datetime.now(UTC).isoformat()}])


def _finite(value: Any) -> Any:
    """JSON has no NaN: a figure that is not a number is null. Floats have seven significant digits."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
