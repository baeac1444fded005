"""Moments in the work on a round, chosen by a test: before each of its accesses to the state, and after the last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Final

import pytest

from flywheel.store.kernel.database import Store
from tests.waiting import until

ACCESSES: Final = 10
"""From the start of the work on a planned round until its worker is watched. After them, there are none while nothing
happens."""
MOMENTS: Final = range(1, ACCESSES + 2)


_IS_WORK: ContextVar[bool] = ContextVar("is_work", default=False)


class Moment:
    """Work in a task of its own, which stands still before the access to the state that has this number. Accesses of
    the tasks that it makes count, too."""

    def __init__(self, work: Coroutine[Any, Any, Any], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._number = number
        self._accesses = 0
        self._may_go_on = asyncio.Event()
        for name in ("read", "write"):
            monkeypatch.setattr(Store, name, self._counting(getattr(Store, name)))
        token = _IS_WORK.set(True)
        self.task = asyncio.create_task(work)
        _IS_WORK.reset(token)

    def _counting(self, access: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(store: Store, *args: Any, **named: Any) -> Any:
            if _IS_WORK.get():
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

    def go_on(self) -> None:
        self._may_go_on.set()
