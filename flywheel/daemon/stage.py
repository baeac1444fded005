"""A stage of the daemon: an action that runs whenever it is woken, and again after an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from flywheel.errors import FlywheelError

log = logging.getLogger(__name__)


class Stage:
    """Runs `action` each time `wake` is set. An error is logged; it does not end the stage."""

    def __init__(self, name: str, action: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self.wake = asyncio.Event()
        self._action = action
        self._last_error = ""

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            await self.wake.wait()
            self.wake.clear()
            if stopping.is_set():
                return
            try:
                await self._action()
                if self._last_error:
                    log.info("%s: recovered", self.name)
                self._last_error = ""
            except FlywheelError as error:
                # Each error is logged once, not at every attempt.
                if str(error) != self._last_error:
                    log.error("%s: %s", self.name, error)
                self._last_error = str(error)
            except Exception:
                log.exception("%s failed; this is a defect, please report it", self.name)
