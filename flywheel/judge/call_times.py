"""How long calls of the judge take: a histogram of this process, for its metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, float("inf"))
"""Upper bounds of the buckets, in seconds."""


class CallTimes:
    """Counts calls by their duration. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def add(self, endpoint: str, outcome: str, seconds: float) -> None:
        """Count a call of `judge` or `judge.backup` that was `answered` or has `failed`."""
        key = endpoint, outcome
        bucket = next(index for index, bound in enumerate(BOUNDS) if seconds <= bound)
        with self._lock:
            self._counts.setdefault(key, [0] * len(BOUNDS))[bucket] += 1
            self._sums[key] = self._sums.get(key, 0.0) + seconds

    def histograms(self) -> Iterator[tuple[str, str, list[tuple[float, int]], float]]:
        """Endpoint, outcome, the number of calls up to each bound, and the seconds of all."""
        with self._lock:
            found = [(key, list(counts), self._sums[key]) for key, counts in self._counts.items()]
        for (endpoint, outcome), counts, seconds in found:
            yield endpoint, outcome, list(zip(BOUNDS, accumulate(counts), strict=True)), seconds


CALL_TIMES: Final = CallTimes()
"""Of all calls of this process. The calls of a round are those of its worker, and not here."""
