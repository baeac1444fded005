"""How fast calls may begin: so many requests, or tokens, in a minute, evenly spaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MINUTE = 60.0


class Pace:
    """A rate per minute, or none. Thread-safe. Turns are evenly spaced, so that there are no bursts to refuse."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds_each = MINUTE / per_minute if per_minute else 0.0
        self._clock = clock
        self._free_at = float("-inf")
        self._lock = threading.Lock()

    def reserve(self, amount: float = 1.0) -> float:
        """Take the next turn for so much; seconds to wait before using it."""
        if not self._seconds_each:
            return 0.0
        with self._lock:
            now = self._clock()
            turn = max(now, self._free_at)
            self._free_at = turn + amount * self._seconds_each
            return turn - now

    def correct(self, difference: float) -> None:
        """It was so much more (or less) than was reserved."""
        if self._seconds_each:
            with self._lock:
                self._free_at += difference * self._seconds_each
