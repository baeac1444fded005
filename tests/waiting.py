"""Waiting for what a process does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class StartError(AssertionError):
    """A real server or browser did not start, for instance because another program took its port."""


def wait_for(condition: Callable[[], Any], what: str, *, seconds: float) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds:g} s in vain for {what}")
