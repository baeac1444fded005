"""Which groups of a step are trained on, and why the others are dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from flywheel.training.data.advantage import NoSignal, no_signal
from flywheel.training.data.misses import is_complete

Drop = Literal["misses", NoSignal, "surplus"]
"""Why a group is dropped: too many of its rollouts ended by a miss, it has fewer than 4 rewards, its rewards are
within 0.02, or the step has enough groups without it."""


def dropped_groups(
    groups: Sequence[int],
    rewards: Sequence[float | None],
    missed: Sequence[bool | None],
    most: int | None = None,
) -> dict[int, Drop]:
    """The groups that are dropped, given each rollout's group, its reward, and whether it ended by a miss (None if it
    failed for another reason). The first `most` of the others are kept."""
    rewards_of: defaultdict[int, list[float]] = defaultdict(list)
    missed_of: defaultdict[int, list[bool | None]] = defaultdict(list)
    for group, reward, is_miss in zip(groups, rewards, missed, strict=True):
        missed_of[group].append(is_miss)
        if reward is not None:
            rewards_of[group].append(reward)
    dropped: dict[int, Drop] = {}
    kept = 0
    for group, misses in missed_of.items():
        # A group without a miss that has too few rollouts lacks rewards.
        if any(misses) and not is_complete(misses):
            dropped[group] = "misses"
        elif lacking := no_signal(rewards_of[group]):
            dropped[group] = lacking
        elif most is not None and kept == most:
            dropped[group] = "surplus"
        else:
            kept += 1
    return dropped
