"""Figures over the whole state, which several pages show. Those of a large state are not counted for each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from sqlalchemy import Connection

from flywheel.config import Config
from flywheel.store.kernel.transitions import utcnow
from flywheel.web.site import Site

T = TypeVar("T")

SLOW_SECONDS: Final = 0.2
OLDER: Final = 30
"""Figures that took longer than `SLOW_SECONDS` are shown for so many times as long as they took."""


class Figures(Generic[T]):
    """The figures that a function reads. Of a state with 100,000 tasks that takes two seconds: then they are up to a
    minute old, and only the request that finds them older waits for newer ones."""

    def __init__(self, site: Site, function: Callable[[Connection, Config], T]) -> None:
        self._site = site
        self._function = function
        self._computing = asyncio.Lock()
        self._found: T | None = None
        self._until = float("-inf")
        self.counted_at = ""
        """When figures that take long were read; empty if they are those of now."""

    async def get(self) -> T:
        """Raises StoreError."""
        if self.counted_at and self._found is not None and self._computing.locked():
            return self._found
        async with self._computing:
            if self._found is None or time.monotonic() >= self._until:
                began, at = time.monotonic(), utcnow()
                self._found = await self._site.read(self._function, self._site.config)
                took = time.monotonic() - began
                self.counted_at = at if took > SLOW_SECONDS else ""
                self._until = time.monotonic() + (OLDER * took if self.counted_at else 0.0)
            return self._found
