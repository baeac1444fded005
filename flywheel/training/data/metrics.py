"""Metrics of a running round: `metrics.jsonl`, one fsynced line per event, and event files of TensorBoard."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from flywheel.records.round import METRICS_FILE
from flywheel.system.files import append_jsonl
from flywheel.training.data.round_progress import Phase

log = logging.getLogger(__name__)


class TensorBoardEvents:
    """An event file of one run of TensorBoard, in its directory. If it cannot be written, one warning says so."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._has_failed = False

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        """Append the numbers of a step. Those of nested mappings are named `outer/inner`; null is left out."""
        if self._has_failed:
            return
        # Imported here: few rounds write them.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in _numbers(figures)]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        try:
            if self._writer is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._writer = EventsWriter(str(self._directory / "events"), f".{os.getpid()}")
                weakref.finalize(self, self._writer.close)
            self._writer.write_event(event)
            self._writer.flush()
        except OSError as error:
            why = error.strerror or error
            log.warning("cannot write %s for training.tensorboard: %s", self._directory, why)
            self._has_failed = True


def _numbers(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float):
            yield f"{above}{name}", float(value)


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
