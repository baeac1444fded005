"""Ids that repeat: a client that seeds its random numbers gives the spans of each of its runs the same ids.

A span is therefore told apart from others by its trace, its id and its start. Plain functions, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SAME_START_NS: Final = 2_000_000
"""Starts that are less than this apart are equal, in nanoseconds: Studio's server and older clients round them."""
RUN_ENDS_NS: Final = 24 * 3600 * 10**9
"""A run has ended when no span with its trace id began for so long, in nanoseconds."""


def runs_of(starts: Iterable[int], known: Iterable[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """The first and the last start of each run among spans with one trace id, in nanoseconds since 1970. Of `known`
    runs only these are known."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted([*((start, start) for start in starts), *known]):
        if runs and first - runs[-1][1] < RUN_ENDS_NS:
            runs[-1] = runs[-1][0], max(runs[-1][1], last)
        else:
            runs.append((first, last))
    return runs
