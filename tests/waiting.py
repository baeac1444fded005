"""Waiting for what a process does in its own time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

SOON = 120.0
"""Seconds within which what a test waits for happens on a busy machine, too."""


class StartError(AssertionError):
    """A real server or browser did not start, for instance because another program took its port."""


def wait_for(condition: Callable[[], Any], what: str, *, seconds: float = SOON) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds:g} s in vain for {what}")


async def until(condition: Callable[[], Any], what: str, *, seconds: float = SOON) -> Any:
    """The first true value of `condition`, which may be a coroutine function, while other tasks of the loop go on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(0.02)
    raise AssertionError(f"waited {seconds:g} s in vain for {what}")
