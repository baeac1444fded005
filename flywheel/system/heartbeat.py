"""Heartbeats: each smallest step of a stage's work beats, so that a stage that hangs is known.

Steps are attempts of a call, pages, transactions, files and polls of a process. A step does not know its stage: it
beats for the one in whose context it runs. SQLite beats within a statement.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import sqlite3

PATIENCE_SECONDS: Final = 600.0
"""How much longer a step may take than the time limit of what it waits for."""
INSTRUCTIONS: Final = 1_000_000
"""Of SQLite's virtual machine between two beats: a few milliseconds."""


class Heartbeat:
    """The beats of one stage. `until` is when the present step should have ended, by the monotonic clock; infinite
    while nothing is in progress. Thread-safe."""

    until = math.inf

    def begin(self) -> None:
        """Begin a pass, in this context: what it calls beats for it."""
        _current.set(self)
        self.until = monotonic() + PATIENCE_SECONDS

    def rest(self) -> None:
        """Nothing is in progress, or it waits for another stage."""
        self.until = math.inf

    def beat(self, limit: float) -> None:
        if self.until < math.inf:
            # Of several threads, the one with the longest limit counts.
            self.until = max(self.until, monotonic() + PATIENCE_SECONDS + limit)

    @property
    def overdue_seconds(self) -> float:
        """For how long the present step should have ended; 0 while it may go on."""
        return max(0.0, monotonic() - self.until)


_current: ContextVar[Heartbeat] = ContextVar("heartbeat")
_of_nobody: Final = Heartbeat()


def current_heartbeat() -> Heartbeat:
    """That of the stage in whose context this is."""
    return _current.get(_of_nobody)


def beat(limit: float = 0.0) -> None:
    """The work goes on. The step that begins may take `limit` seconds by its own rules."""
    current_heartbeat().beat(limit)


def beat_within(connection: sqlite3.Connection) -> None:
    """Beat while a statement of this connection runs."""
    connection.set_progress_handler(beat, INSTRUCTIONS)
