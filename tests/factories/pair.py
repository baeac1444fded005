"""Pairs of replies to learn from, as tokens."""

from __future__ import annotations

from flywheel.training.data.samples import Pair, Sample


def pair_sample(*parts: tuple[int, ...]) -> Sample:
    """Context and tokens of the policy in turn."""
    ids = tuple(token for part in parts for token in part)
    return Sample(ids, tuple(bool(place % 2) for place, part in enumerate(parts) for _ in part))


PAIRS = (
    Pair("a", pair_sample((1, 20, 21), (40, 41, 42, 2)), pair_sample((1, 20, 21), (60, 2))),
    Pair(
        "b", pair_sample((1, 30), (60, 61), (70, 71), (44, 2)), pair_sample((1, 30), (62, 61), (80, 81, 82), (45, 2))
    ),
    Pair("c", pair_sample((1, 31, 32, 33, 34), (50, 2)), pair_sample((1, 31, 32, 33, 34), (51, 52, 53, 2))),
)
"""The second one has results of tools between its messages."""
