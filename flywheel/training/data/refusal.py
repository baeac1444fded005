"""Why a round is refused, which is a result: its tasks give nothing to learn, or not what they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flywheel.errors import TrainError
from flywheel.training.data.misses import growing_misses
from flywheel.training.data.rollout import Batch

FIRST_LOOK = 2
"""Number of first steps without different rewards after which a round is refused; one could be chance."""


class RefusedError(Exception):
    """This round's tasks have no training signal; the message says why."""


def refuse_without_spread(batches: Sequence[Batch], min_share: float) -> None:
    """Raise RefusedError when too few groups have few misses and rewards that differ: the others are dropped.

    Raises TrainError when the judge gave no reward at all, in which case the tasks can be used by another round.
    """
    groups = sum(batch.groups for batch in batches)
    spread = sum(batch.groups_with_spread for batch in batches)
    if spread > min_share * groups:
        return
    rewards = [reward for batch in batches for reward in batch.rewards]
    missed = sum(batch.missed for batch in batches)
    if not rewards and sum(batch.undecided for batch in batches) >= missed:
        raise TrainError(
            "learn from the first steps of the round",
            "no rollout has a reward",
            "Check the judge's endpoint and the worker's log; the round can be started again.",
            retryable=True,
        )
    seen = f"rewards from {min(rewards):g} to {max(rewards):g}" if rewards else "no rewards"
    dropped = Counter(why for batch in batches for why in batch.dropped.values())
    if dropped["misses"]:
        total = sum(len(batch.rollouts) for batch in batches)
        raise RefusedError(
            f"nothing can be learned: {spread} of {groups} groups in the first steps can be trained on ({seen});"
            f" {dropped['misses']} were dropped because {missed} of {total} rollouts ended at a call without a"
            " recorded result: the policy calls tools differently from the traces (rollout.tools)"
        )
    raise RefusedError(
        f"nothing can be learned: {spread} of {groups} groups in the first steps have rewards that differ ({seen});"
        " the rubric may be too easy or too hard for these tasks"
    )


def refuse_growing_misses(shares: Sequence[Sequence[float]], of_calling: Sequence[Sequence[float]]) -> None:
    """Raise RefusedError when the share of misses grew over the steps, given that of each group of each step.

    It must have grown among rollouts that called a tool, too: a policy that learns to call has more misses, although
    its arguments are no worse.
    """
    if (reason := growing_misses(shares)) and growing_misses(of_calling):
        raise RefusedError(reason)
