"""The advantage of each rollout of a step: its reward against the other rewards of its group."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Literal

MIN_REWARDS: Final = 4
"""Rollouts with a reward that a group needs: the mean of fewer is no baseline."""
MIN_RANGE: Final = 0.02
"""Range of rewards under which a group is dropped: its differences are noise of the judge."""
MIN_DEVIATION: Final = 0.1
"""Smallest divisor of advantages. Without it, differences of 0.01 would have advantages around 1."""

Scale = Literal["group", "batch", "none"]
NoSignal = Literal["rewards", "spread"]


def no_signal(rewards: Sequence[float]) -> NoSignal | None:
    """What a group with these rewards lacks: enough of them, or a difference; None if it can be trained on."""
    if len(rewards) < MIN_REWARDS:
        return "rewards"
    # Rounding: 0.52 - 0.5 is a little more than 0.02, and 0.62 - 0.6 a little less.
    return None if max(rewards) - min(rewards) >= MIN_RANGE - 1e-9 else "spread"


def group_advantages(
    groups: Sequence[int], rewards: Sequence[float | None], scale: Scale = "group"
) -> list[float | None]:
    """The advantage of each rollout, given its group and its reward; None for rollouts that are not trained on.

    A = (reward - mean) / max(deviation, 0.1) over the rollouts of the group that have a reward (DeepSeekMath, arXiv
    2402.03300, with a floor). The deviation is the sample's, as in TRL; `batch` takes that of all rewards of the
    step, `none` divides by nothing. A group with fewer than 4 rewards, or rewards within 0.02, is dropped.
    """
    of_group: defaultdict[int, list[float]] = defaultdict(list)
    for group, reward in zip(groups, rewards, strict=True):
        if reward is not None:
            of_group[group].append(reward)
    whole = _deviation([reward for values in of_group.values() for reward in values])
    baselines = {
        group: (statistics.fmean(values), {"group": _deviation(values), "batch": whole, "none": 1.0}[scale])
        for group, values in of_group.items()
        if no_signal(values) is None
    }
    return [
        None if reward is None or group not in baselines else (reward - baselines[group][0]) / baselines[group][1]
        for group, reward in zip(groups, rewards, strict=True)
    ]


def _deviation(values: Sequence[float]) -> float:
    return max(MIN_DEVIATION, statistics.stdev(values) if len(values) > 1 else 0.0)
