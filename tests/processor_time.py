"""The processor time that work takes, for tests of how it grows with a text.

What else the machine does can double a measurement, for example when the caches are somebody else's. So the least of
several counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

MEASUREMENTS = 5


def seconds(work: Callable[[], object]) -> float:
    """Of this thread. Garbage is not collected meanwhile: most of it is what other tests have left."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        begun = time.thread_time()
        work()
        return time.thread_time() - begun
    finally:
        if was_enabled:
            gc.enable()


def least_seconds(*works: Callable[[], object]) -> list[float]:
    """The least time of each work, all of them measured in turn."""
    rounds = [[seconds(work) for work in works] for _ in range(MEASUREMENTS)]
    return [min(measured) for measured in zip(*rounds, strict=True)]
