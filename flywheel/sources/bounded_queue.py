"""A queue for one producer and one consumer, bounded by items and by bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class ByteBudget:
    """Bytes that several queues share."""

    max_bytes: int
    used: int = 0


class BoundedQueue(Generic[T]):
    """At most `max_items`, `max_bytes` and the rest of the `shared` budget. One item always fits, whatever its size
    and however little of the budget the other queues have left."""

    def __init__(self, max_items: int, max_bytes: int, shared: ByteBudget) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._shared = shared
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._has_ended = False
        # Producer and consumer never wait at the same time: one needs a full queue, the other an empty one.
        self._changed = asyncio.Event()

    async def put(self, item: T, size: int) -> None:
        """Add an item of `size` bytes; waits while it does not fit."""
        while self._items and (
            len(self._items) >= self._max_items
            or self._bytes + size > self._max_bytes
            or self._shared.used + size > self._shared.max_bytes
        ):
            self._changed.clear()
            await self._changed.wait()
        self._items.append((item, size))
        self._bytes += size
        self._shared.used += size
        self._changed.set()

    def end(self) -> None:
        """No more items will follow."""
        self._has_ended = True
        self._changed.set()

    async def take(self, seconds: float | None = None) -> T | None:
        """The next item; None at the end. Raises TimeoutError if there is none within `seconds`."""
        async with asyncio.timeout(seconds):
            while not self._items:
                if self._has_ended:
                    return None
                self._changed.clear()
                await self._changed.wait()
        item, size = self._items.popleft()
        self._bytes -= size
        self._shared.used -= size
        self._changed.set()
        return item

    def clear(self) -> None:
        """Discard all items."""
        self._items.clear()
        self._shared.used -= self._bytes
        self._bytes = 0
        self._changed.set()
