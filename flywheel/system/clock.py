"""The clock of timers: it shows the wall's time when this process started, and since then what has elapsed.

It goes on evenly where the clock of the machine is set, so that nothing waits until that has caught up. Times that
outlive the process are the wall's.
"""

from __future__ import annotations

import time
from typing import Final

_OFFSET_NS: Final = time.time_ns() - time.monotonic_ns()


def steady_ns() -> int:
    """Nanoseconds since 1970."""
    return time.monotonic_ns() + _OFFSET_NS


def steady() -> float:
    """Seconds since 1970."""
    return steady_ns() / 1e9


def moved_seconds() -> float:
    """By how much the clock of the machine was set since this process started."""
    return time.time() - steady()
