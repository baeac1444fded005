"""A stage of the daemon: something that is done when it is woken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from flywheel.errors import FlywheelError

log = logging.getLogger(__name__)


class Stage:
    """One step of the wheel: runs its action when woken, and survives whatever goes wrong in it."""

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
                    log.info("%s: all is well again", self.name)
                self._last_error = ""
            except FlywheelError as error:
                # The same trouble is told once, not at every try.
                if str(error) != self._last_error:
                    log.error("%s: %s", self.name, error)
                self._last_error = str(error)
            except Exception:
                log.exception("%s failed; this is a defect, please report it", self.name)
