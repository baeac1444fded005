"""People who ask at a rate: pace, how many ask at once, and when it has failed too often.

Owns the coming of questions; must not know what is asked, or of whom.
"""

from __future__ import annotations

import abc
import asyncio
import random
import sqlite3
from collections.abc import Coroutine
from typing import Final

IN_FLIGHT: Final = 8
LONGEST_PAUSE_SECONDS: Final = 3.0
MAX_FAILURES: Final = 20


class TrafficError(Exception):
    """The agent could not be asked for too many times in a row."""


class Users(abc.ABC):
    """Dialogues at a rate that may be changed at any time."""

    def __init__(self, model: str, *, rate: float, seed: int | None = None) -> None:
        """`rate` is dialogues per second."""
        self.rate = rate
        self.asked = 0
        self.failed = 0
        self.random = random.Random(seed)
        self.model = model
        self._failures_in_a_row = 0

    @abc.abstractmethod
    async def run(self) -> None:
        """Ask until cancelled. Raises TrafficError and sqlite3.Error."""

    @abc.abstractmethod
    async def dialogue(self) -> None:
        """One user's questions."""

    async def keep_asking(self, *beside: Coroutine[object, object, None]) -> None:
        """Dialogues until cancelled, with other work `beside`."""
        places = asyncio.Semaphore(IN_FLIGHT)
        try:
            async with asyncio.TaskGroup() as tasks:
                for work in beside:
                    tasks.create_task(work)
                while True:
                    await self._pace()
                    await places.acquire()
                    tasks.create_task(self.dialogue()).add_done_callback(lambda _: places.release())
        except BaseExceptionGroup as errors:
            # By hand: before 3.11.4, Python puts what is raised below `except*` into a group again.
            ended, _ = errors.split((TrafficError, sqlite3.Error))
            if ended is None:
                raise
            raise ended.exceptions[0] from None

    def has_answered(self) -> None:
        self._failures_in_a_row = 0

    async def has_failed(self, error: Exception) -> None:
        """Raises TrafficError for too many in a row."""
        self.failed += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES:
            why = f"{MAX_FAILURES} questions to {self.model} failed in a row, the last with {error!r}"
            raise TrafficError(why) from error
        await asyncio.sleep(1)

    async def _pace(self) -> None:
        # Users do not come by the clock; a changed rate is noticed soon all the same.
        await asyncio.sleep(min(self.random.expovariate(self.rate), LONGEST_PAUSE_SECONDS))
