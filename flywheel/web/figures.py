"""Figures over the whole state, which several pages show. Of a large state they are computed beside the requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from sqlalchemy import Connection

from flywheel.config import Config
from flywheel.errors import FlywheelError
from flywheel.store.kernel.transitions import utcnow
from flywheel.web.site import Site

T = TypeVar("T")

SLOW_SECONDS: Final = 0.2
OLDER: Final = 10
"""Figures that took longer than `SLOW_SECONDS` are shown for so many times as long as they took, and then until newer
ones are there."""


class Figures(Generic[T]):
    """The figures that a function reads. Of a state with 100,000 tasks that takes two seconds: the first request
    waits for them, later ones get the last ones."""

    def __init__(self, site: Site, function: Callable[[Connection, Config], T]) -> None:
        self._site = site
        self._function = function
        self._computing = asyncio.Lock()
        self._found: T | None = None
        self._until = float("-inf")
        self._is_slow = False
        self._refreshing: asyncio.Task[None] | None = None
        self.counted_at = ""
        """When figures that take long were read; empty if they are those of now."""

    async def get(self) -> T:
        """Raises StoreError."""
        if not self._is_slow:
            async with self._computing:
                if not self._is_slow:
                    await self._compute()
        elif time.monotonic() >= self._until and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._refresh())
        assert self._found is not None
        return self._found

    async def _compute(self) -> None:
        began, at = time.monotonic(), utcnow()
        self._found = await self._site.read(self._function, self._site.config)
        took = time.monotonic() - began
        self._is_slow = took > SLOW_SECONDS
        self._until = time.monotonic() + OLDER * took
        self.counted_at = at if self._is_slow else ""

    async def _refresh(self) -> None:
        try:
            await self._compute()
        except FlywheelError:
            # The next request waits for new figures, and shows the error.
            self._is_slow = False
