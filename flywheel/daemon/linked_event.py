"""An event that another one sets too, without its being touched."""

from __future__ import annotations

import threading
import time

LOOK_SECONDS = 0.1
"""How soon a wait notices the other event."""


class LinkedEvent(threading.Event):
    """Set by this run for itself, or by the caller for all runs: the caller's event is only looked at."""

    def __init__(self, outer: threading.Event | None) -> None:
        super().__init__()
        self._outer = outer

    def is_set(self) -> bool:
        return super().is_set() or (self._outer is not None and self._outer.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Event.wait`; the caller's event ends it too, within LOOK_SECONDS."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (left := until - time.monotonic()) > 0:
            super().wait(min(left, LOOK_SECONDS))
        return self.is_set()
