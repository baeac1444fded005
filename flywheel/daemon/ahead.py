"""What one task makes ahead of another that uses it: so many at most, and so many bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """A queue for one task that puts and one that takes. One item always has room, however large it is."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._size = 0
        self._has_ended = False
        self._is_there = asyncio.Event()
        self._is_taken = asyncio.Event()

    async def put(self, item: T, size: int) -> None:
        """Hand on what has `size` bytes; wait while there is no room for it."""
        while self._items and (len(self._items) >= self._most or self._size + size > self._most_bytes):
            self._is_taken.clear()
            await self._is_taken.wait()
        self._items.append((item, size))
        self._size += size
        self._is_there.set()

    def end(self) -> None:
        """Nothing more will be put."""
        self._has_ended = True
        self._is_there.set()

    async def take(self) -> T | None:
        """The next item; None at the end."""
        while not self._items:
            if self._has_ended:
                return None
            self._is_there.clear()
            await self._is_there.wait()
        item, size = self._items.popleft()
        self._size -= size
        self._is_taken.set()
        return item
