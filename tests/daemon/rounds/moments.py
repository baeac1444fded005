"""Moments in the work on a round, chosen by a test: before each of its accesses to the state, and after the last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import pytest

from flywheel.store.kernel.database import Store
from tests.waiting import until

ACCESSES: Final = 10
"""From the start of the work on a planned round until its worker is watched. After them, there are none while nothing
happens."""
MOMENTS: Final = range(1, ACCESSES + 2)


class Moment:
    """Work in a task of its own, which stands still before the access to the state that has this number."""

    def __init__(self, work: Coroutine[Any, Any, Any], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._number = number
        self._accesses = 0
        self._may_go_on = asyncio.Event()
        for name in ("read", "write"):
            monkeypatch.setattr(Store, name, self._counting(getattr(Store, name)))
        self.task = asyncio.create_task(work)

    def _counting(self, access: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(store: Store, *args: Any, **named: Any) -> Any:
            if asyncio.current_task() is self.task:
                self._accesses += 1
                if self._accesses == self._number:
                    await self._may_go_on.wait()
            return await access(store, *args, **named)

        return counted

    async def has_come(self, worker_is_up: Callable[[], bool]) -> None:
        await until(lambda: self._accesses == min(self._number, ACCESSES), f"access {self._number} to the state")
        if self._number > ACCESSES:
            await until(worker_is_up, "the worker")
        assert not self.task.done()

    async def go_on_beside(self, other: Coroutine[Any, Any, Any], has_begun: Callable[[], Any]) -> Any:
        """Let the work go on when something else has begun; the result of that."""
        beside = asyncio.create_task(other)
        await until(has_begun, "the beginning")
        self._may_go_on.set()
        return await beside
