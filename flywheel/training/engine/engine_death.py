"""Requests to an engine whose process has died fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

LOOK_SECONDS: Final = 2.0

T = TypeVar("T")


async def unless_dead(llm: Any, work: Coroutine[Any, Any, T]) -> T:
    """The result of a request to an `AsyncLLM`. Raises vLLM's EngineDeadError if the engine is dead: when its process
    is killed, vLLM 0.32 knows it, but leaves requests in flight waiting for ever."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=LOOK_SECONDS))[0]:
            if llm.errored:
                raise llm.dead_error
        return await task
    finally:
        task.cancel()
