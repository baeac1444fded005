"""Patience: what a round does while its judge is away or the budget is spent. It waits, and tells for what."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 30.0
"""How long the judge is left alone before it is asked whether it is back: twice as long each time."""
ROOM_SECONDS: Final = 1.0

log = logging.getLogger("flywheel.worker")

Pause = Callable[[str], None]
"""Told what the round waits for, and "" when it goes on."""


class Patience:
    """Thread-safe: one thread waits and looks, the others wait for it."""

    def __init__(
        self,
        wait_seconds: float,
        pause: Pause,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`wait_seconds` is how long an outage may last before nobody waits for its end."""
        self._wait_seconds = wait_seconds
        self._pause, self._clock, self._sleep = pause, clock, sleep
        self._waiting = threading.RLock()
        self.answers = 0
        """How often the judge has answered."""
        self._away_since: float | None = None

    def answered(self) -> None:
        """The judge is there."""
        self.answers += 1
        self._away_since = None

    def until_back(self, answers: int, why: str, is_back: Callable[[], bool]) -> bool:
        """Wait for the judge after a call has failed that was begun after so many answers; whether it is back."""
        with self._waiting:
            if self.answers > answers:
                return True
            if self._away_since is None:
                self._away_since = self._clock()
            end = self._away_since + self._wait_seconds
            if self._clock() >= end:
                return False
            log.warning("%s: the round waits, %g s at most", why, end - self._clock())
            self._pause(why)
            try:
                for seconds in _delays():
                    self._sleep(min(seconds, end - self._clock()))
                    if is_back():
                        self.answered()
                        log.warning("the judge is back: the round goes on")
                        return True
                    if self._clock() >= end:
                        return False
            finally:
                self._pause("")
        raise AssertionError("delays have no end")

    def until_room(self, refused: Callable[[], str]) -> None:
        """Wait until `refused` has no reason any more why nothing may be spent."""
        with self._waiting:
            try:
                while why := refused():
                    self._pause(why)
                    self._sleep(ROOM_SECONDS)
            finally:
                self._pause("")


def _delays() -> Iterator[float]:
    seconds = FIRST_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, LONGEST_SECONDS)
