"""Groups of a step: the advantages of their rollouts, the groups that are trained on, what misses leave out.

A miss removes exactly the rollouts that called a tool differently. If a group has many, those that remain can teach
the policy to avoid the tool, while the training reward rises: so such groups are dropped, a round in which misses
grow ends early, and the gate scores a miss of the candidate 0.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Literal

Side = Literal["candidate", "deployed"]

MIN_COMPLETE_SHARE: Final = 0.75
"""Smallest share of a group's rollouts without a miss."""
WINDOW: Final = 4
"""Steps at either end of a round whose miss shares are compared."""
MIN_GROWTH: Final = 0.1
"""Growth of the miss share that ends a round, if it is also more than chance."""
STANDARD_ERRORS: Final = 3.0
"""Growth in standard errors that is more than chance."""


def is_complete(missed: Sequence[bool | None]) -> bool:
    """Whether a group is trained on: at least 75 % and at least 4 of its rollouts had no miss. None is a rollout that
    failed for another reason, as if the group were one smaller."""
    known = [each for each in missed if each is not None]
    complete = known.count(False)
    return complete >= MIN_REWARDS and complete >= MIN_COMPLETE_SHARE * len(known)


def means_of(first: Sequence[float], last: Sequence[float]) -> tuple[float, float, float] | None:
    """The means of two samples, and the standard error of their difference; None if one of them has no variance. The
    rollouts of a group are not independent, so the samples are of groups."""
    if min(len(first), len(last)) < 2:
        return None
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (first, last)))
    return statistics.fmean(first), statistics.fmean(last), error


def growing_misses(steps: Sequence[Sequence[float]]) -> str:
    """Why the round must end, given the miss share of each group of each step; empty if it may go on.

    The last four steps are compared with the first four.
    """
    if len(steps) < 2 * WINDOW:
        return ""
    found = means_of(*([share for step in some for share in step] for some in (steps[:WINDOW], steps[-WINDOW:])))
    if found is None:
        return ""
    before, now, error = found
    if now - before <= max(MIN_GROWTH, STANDARD_ERRORS * error):
        return ""
    return (
        f"the share of rollouts with a call that has no recorded result grew from {before:.0%} in the first"
        f" {WINDOW} steps to {now:.0%} in the last {WINDOW}, and nothing corrects wrong arguments"
    )


def gate_rewards(
    rewards: Sequence[float | None],
    missed: Sequence[bool],
    side: Side,
    *,
    at_bound: bool = False,
    worst: float = 0.0,
    best: float = 1.0,
) -> list[float | None]:
    """The rewards of a side's answers with those of misses filled in; other answers without a reward stay undecided.

    A candidate's miss scores `worst`. A miss of the deployed adapter scores the mean of its side's other rewards;
    with `at_bound`, or if there are none, it scores `best`, the most that it could be.
    """
    pairs = list(zip(rewards, missed, strict=True))
    known = [reward for reward, is_miss in pairs if reward is not None and not is_miss]
    for_deployed = best if at_bound or not known else statistics.fmean(known)
    score = worst if side == "candidate" else for_deployed
    return [score if is_miss else reward for reward, is_miss in pairs]


MIN_REWARDS: Final = 4
"""Rollouts with a reward that a group needs: the mean of fewer is no baseline."""
MIN_RANGE: Final = 0.02
"""Range under which a group is dropped, of rewards from 0 to 1: its differences are noise of the judge."""
MIN_DEVIATION: Final = 0.1
"""Smallest divisor of advantages, of such rewards. Without it, differences of 0.01 would have advantages around 1."""

Scale = Literal["group", "batch", "none"]
NoSignal = Literal["rewards", "spread"]


def no_signal(rewards: Sequence[float], span: float = 1.0) -> NoSignal | None:
    """What a group with these rewards lacks: enough of them, or a difference; None if it can be trained on. `span` is
    the range that rewards are expected to have."""
    if len(rewards) < MIN_REWARDS:
        return "rewards"
    # Rounding: 0.52 - 0.5 is a little more than 0.02, and 0.62 - 0.6 a little less.
    return None if max(rewards) - min(rewards) >= (MIN_RANGE - 1e-9) * span else "spread"


def group_advantages(
    groups: Sequence[int], rewards: Sequence[float | None], scale: Scale = "group", span: float = 1.0
) -> list[float | None]:
    """The advantage of each rollout, given its group and its reward; None for rollouts that are not trained on.

    A = (reward - mean) / max(deviation, 0.1) over the rollouts of the group that have a reward (DeepSeekMath, arXiv
    2402.03300, with a floor). The deviation is the sample's, as in TRL; `batch` takes that of all rewards of the
    step, `none` divides by nothing. A group with fewer than 4 rewards, or rewards within 0.02, is dropped. Both
    limits are multiplied by `span`, the range that rewards are expected to have.
    """
    of_group: defaultdict[int, list[float]] = defaultdict(list)
    for group, reward in zip(groups, rewards, strict=True):
        if reward is not None:
            of_group[group].append(reward)
    floor = MIN_DEVIATION * span
    whole = _deviation([reward for values in of_group.values() for reward in values], floor)
    baselines = {
        group: (statistics.fmean(values), {"group": _deviation(values, floor), "batch": whole, "none": 1.0}[scale])
        for group, values in of_group.items()
        if no_signal(values, span) is None
    }
    return [
        None if reward is None or group not in baselines else (reward - baselines[group][0]) / baselines[group][1]
        for group, reward in zip(groups, rewards, strict=True)
    ]


def _deviation(values: Sequence[float], floor: float) -> float:
    return max(floor, statistics.stdev(values) if len(values) > 1 else 0.0)


Drop = Literal["misses", NoSignal, "surplus"]
"""Why a group is dropped: too many of its rollouts ended by a miss, it has fewer than 4 rewards, its rewards are
within 0.02 times the range that they are expected to have, or the step has enough groups without it."""


def dropped_groups(
    groups: Sequence[int],
    rewards: Sequence[float | None],
    missed: Sequence[bool | None],
    most: int | None = None,
    span: float = 1.0,
) -> dict[int, Drop]:
    """The groups that are dropped, given each rollout's group, its reward, and whether it ended by a miss (None if it
    failed for another reason). The first `most` of the others are kept. `span` is the range that rewards are expected
    to have."""
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
        elif lacking := no_signal(rewards_of[group], span):
            dropped[group] = lacking
        elif most is not None and kept == most:
            dropped[group] = "surplus"
        else:
            kept += 1
    return dropped
