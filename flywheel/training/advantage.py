"""The advantage of each rollout of a step: its reward against the other rewards of its group."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Literal

EPSILON: Final = 1e-4
"""TRL adds it to the deviation."""

Scale = Literal["group", "batch", "none"]


def group_advantages(
    groups: Sequence[int], rewards: Sequence[float | None], scale: Scale = "group"
) -> list[float | None]:
    """The advantages that TRL's GRPOTrainer computes, given each rollout's group and reward; None without a reward,
    where TRL uses 0.

    The deviation is the sample's. Where it is undefined, because there is only one reward, the advantage is 0.
    """
    of_group: defaultdict[int, list[float]] = defaultdict(list)
    for group, reward in zip(groups, rewards, strict=True):
        if reward is not None:
            of_group[group].append(reward)
    means = {group: statistics.fmean(values) for group, values in of_group.items()}
    whole = [reward for reward in rewards if reward is not None]
    divisors = {
        group: 1.0 if scale == "none" else _deviation(values if scale == "group" else whole)
        for group, values in of_group.items()
    }
    return [
        None if reward is None else (reward - means[group]) / divisors[group]
        for group, reward in zip(groups, rewards, strict=True)
    ]


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) + EPSILON if len(values) > 1 else float("inf")
