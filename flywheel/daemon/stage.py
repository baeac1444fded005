"""A stage of the daemon: an action that runs whenever it is woken, and again after an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from flywheel.errors import FlywheelError
from flywheel.system.shortage import shortage_of

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
            except Exception as error:
                failure = error if isinstance(error, FlywheelError) else _lack(self.name, error)
                if failure is None:
                    log.exception("%s failed; this is a defect, please report it", self.name)
                    continue
                # Each error is logged once, not at every attempt.
                if str(failure) != self._last_error:
                    log.error("%s: %s", self.name, failure)
                self._last_error = str(failure)


def _lack(name: str, error: Exception) -> FlywheelError | None:
    """An error about what this process lacks; None for a defect."""
    lack = shortage_of(error)
    return FlywheelError(f"run {name}", *lack, retryable=True) if lack is not None else None
