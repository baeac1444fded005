"""How many calls may be in flight: as many as asked for, fewer while the endpoint wants fewer.

Additive increase, multiplicative decrease (Chiu and Jain, 1989): a round of answers lets in one more, a refusal for
speed halves them. Refusals of calls that began before the last decrease are echoes of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

BACK_OFF: Final = 0.5
LOOK_SECONDS: Final = 0.1
"""How often somebody who waits for a place looks whether to stop."""


@dataclass(frozen=True, slots=True)
class Place:
    """A call in flight, from when on."""

    since: float


class InFlight:
    """Places for calls, between 1 and `most`. Thread-safe."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._limit = float(most)
        self._taken = 0
        self._last_cut = float("-inf")
        self._clock = clock
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        return int(self._limit)

    def enter(self, stop: threading.Event) -> Place | None:
        """Wait for a place; None when it is time to stop."""
        with self._changed:
            while self._taken >= self.limit:
                if stop.is_set():
                    return None
                self._changed.wait(LOOK_SECONDS)
            self._taken += 1
            return Place(self._clock())

    def leave(self, place: Place, *, throttled: bool | None) -> None:
        """Give the place back. `throttled` is None when the answer said nothing about speed."""
        with self._changed:
            self._taken -= 1
            if throttled and place.since > self._last_cut:
                self._limit = max(1.0, self._limit * BACK_OFF)
                self._last_cut = self._clock()
            elif throttled is False and self._limit < self.most:
                self._limit = min(float(self.most), self._limit + 1.0 / self._limit)
            self._changed.notify_all()
