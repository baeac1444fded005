"""Pauses a round while its judge is unreachable or the budget is spent, and reports the reason."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 30.0
"""Wait in seconds before the judge is tried again, doubled each time."""
ROOM_SECONDS: Final = 1.0

log = logging.getLogger("flywheel.training.worker")

Pause = Callable[[str], None]
"""Called with the reason of a pause, and with "" when the round resumes."""


class Patience:
    """Thread-safe: one thread polls, the others wait for it."""

    def __init__(
        self,
        wait_seconds: float,
        pause: Pause,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`wait_seconds` is the longest outage that is waited for."""
        self._wait_seconds = wait_seconds
        self._pause, self._clock, self._sleep = pause, clock, sleep
        self._waiting = threading.RLock()
        self.answers = 0
        """The number of the judge's answers so far."""
        self._away_since: float | None = None

    def answered(self) -> None:
        """The judge has answered."""
        self.answers += 1
        self._away_since = None

    def until_back(self, answers: int, why: str, is_back: Callable[[], bool]) -> bool:
        """Wait for the judge after a failed call that started after `answers` answers. Returns whether it has
        recovered."""
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
        """Wait until `refused` returns no reason."""
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
