"""Event files of TensorBoard with the numbers of each step."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
