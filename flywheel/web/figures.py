"""Figures over the whole state, which several pages show. Those of a large state are not counted for each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.errors import FlywheelError
from flywheel.store.kernel.transitions import utcnow
from flywheel.web.site import Site

T = TypeVar("T")

SLOW_SECONDS: Final = 0.2
OLDER: Final = 30
"""Figures that took longer than `SLOW_SECONDS` are due again after this many times as long."""


class Figures(Generic[T]):
    """The figures that a function reads. Of a state with 100,000 tasks that takes seconds: then those of the last
    time are shown, and newer ones are counted in the background once they are due."""

    def __init__(self, site: Site, function: Callable[[Connection, Config], T]) -> None:
        self._site = site
        self._function = function
        self._counting = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None
        self._found: T | None = None
        self._until = float("-inf")
        self.counted_at = ""
        """When figures that take long were read; empty if they are those of now."""

    async def get(self) -> T:
        """Raises StoreError."""
        if self._found is not None and self.counted_at:
            found = self._found
            if time.monotonic() >= self._until and (self._background is None or self._background.done()):
                self._background = asyncio.create_task(self.renew())
            return found
        async with self._counting:
            return await self._count() if self._found is None or not self.counted_at else self._found

    async def renew(self) -> None:
        """Count anew. If the state cannot be read, the next request says why."""
        async with self._counting:
            try:
                await self._count()
            except FlywheelError:
                self._found = None

    async def _count(self) -> T:
        began, at = time.monotonic(), utcnow()
        self._found = await self._site.read(self._function, self._site.config)
        took = time.monotonic() - began
        self.counted_at = at if took > SLOW_SECONDS else ""
        self._until = time.monotonic() + OLDER * took
        return self._found
