"""What one task makes ahead of another that uses it: so many at most, and so many bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Room:
    """Bytes that several queues share."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.taken = 0


class Ahead(Generic[T]):
    """A queue for one task that puts and one that takes. One item always has room, however large it is, and however
    little of what is `shared` the others have left."""

    def __init__(self, most: int, most_bytes: int, shared: Room) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._shared = shared
        self._items: deque[tuple[T, int]] = deque()
        self._size = 0
        self._has_ended = False
        self._is_there = asyncio.Event()
        self._is_taken = asyncio.Event()

    async def put(self, item: T, size: int) -> None:
        """Hand on what has `size` bytes; wait while there is no room for it."""
        while self._items and not self._has_room(size):
            self._is_taken.clear()
            await self._is_taken.wait()
        self._items.append((item, size))
        self._count(size)
        self._is_there.set()

    def end(self) -> None:
        """Nothing more will be put."""
        self._has_ended = True
        self._is_there.set()

    async def take(self, seconds: float | None = None) -> T | None:
        """The next item; None at the end. Raises TimeoutError when there is none for so long."""
        async with asyncio.timeout(seconds):
            while not self._items:
                if self._has_ended:
                    return None
                self._is_there.clear()
                await self._is_there.wait()
        item, size = self._items.popleft()
        self._count(-size)
        self._is_taken.set()
        return item

    def clear(self) -> None:
        """Give up what was not taken."""
        self._items.clear()
        self._count(-self._size)
        self._is_taken.set()

    def _has_room(self, size: int) -> bool:
        return (
            len(self._items) < self._most
            and self._size + size <= self._most_bytes
            and self._shared.taken + size <= self._shared.most_bytes
        )

    def _count(self, size: int) -> None:
        self._size += size
        self._shared.taken += size
