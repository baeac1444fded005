"""A policy that collapses while GRPO trains it: its entropy is lost, or its completions have another length by far,
and its reward falls. Such a round ends.

A policy that becomes right loses entropy, too (arXiv 2505.22617 has reward as a function of entropy), and may answer
more briefly. So neither ends a round as long as the reward does not fall. A collapse within the first two steps, with
which the others are compared, is not found. The divergence from the reference policy does not count: no published
bound holds for different models and tasks.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.training.data.rollout import RolloutBatch, mean
from flywheel.training.optim.round_steps import RoundRefusedError

log = logging.getLogger(__name__)

FIRST: Final = 2
"""Number of first steps that the others are compared with."""
IN_A_ROW: Final = 3
"""Number of successive steps with a sign of collapse that end a round whose reward falls."""
LOW_ENTROPY: Final = 0.2
"""Share of the first steps' entropy below which it is a sign. Chosen, not derived, as is the next one."""
OTHER_LENGTH: Final = 3.0
"""Factor by which completions are longer or shorter than in the first steps from which it is a sign."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Of one step: mean entropy in nats and mean length of completions in tokens, None if unknown, and the mean
    reward of each group of rollouts."""

    entropy: float | None
    tokens: float | None
    rewards: Sequence[float]


class CollapsedError(RoundRefusedError):
    """The last three steps had a policy that has collapsed."""


class CollapseWatch:
    """Compares the steps of a round, in their order, with the first ones. Each kind of sign is logged once."""

    def __init__(self) -> None:
        self._steps: list[StepFigures] = []
        self._logged: set[str] = set()

    def rolled_out(self, entropy: float | None, batch: RolloutBatch) -> None:
        """`add` the figures of a step with these rollouts. Without an `entropy`, because nothing was trained on, it
        is estimated by the mean negative log-probability of the sampled tokens."""
        done = [rollout.completion for rollout in batch.rollouts if not rollout.completion.error]
        if entropy is None:
            entropy = mean([-each for completion in done for each in completion.logprobs if each is not None])
        tokens = mean([float(len(completion.token_ids)) for completion in done])
        self.add(
            StepFigures(entropy, tokens, [statistics.fmean(group) for group in batch.rewards_of_groups.values()])
        )

    def add(self, step: StepFigures) -> None:
        """Raises CollapsedError when the policy has collapsed: each of the last three steps has a sign of it, and
        their mean reward is below that of the first two steps by more than the standard error of the difference. The
        rollouts of a group are not independent, so the standard error is that of group means."""
        self._steps.append(step)
        first, last = self._steps[:FIRST], self._steps[FIRST:][-IN_A_ROW:]
        signs = [_signs(first, each) for each in last]
        for kind in signs[-1].keys() - self._logged if signs else ():
            log.warning("the policy may be collapsing (step %d of GRPO): %s", len(self._steps), signs[-1][kind])
            self._logged.add(kind)
        if len(last) == IN_A_ROW and all(signs) and (fall := _fall(first, last)):
            raise CollapsedError(
                f"the policy collapsed in {IN_A_ROW} steps in a row: {' and '.join(signs[-1].values())}; {fall}."
                " Lower training.learning_rate, or set training.beta"
            )


def _signs(first: Sequence[StepFigures], step: StepFigures) -> dict[str, str]:
    """What a step has of a collapse, by kind."""
    found: dict[str, str] = {}
    before = mean([each.entropy for each in first if each.entropy is not None])
    if before is not None and step.entropy is not None and step.entropy < LOW_ENTROPY * before:
        found["entropy"] = (
            f"mean entropy fell from {before:.3g} nats in the first {FIRST} steps to {step.entropy:.3g}"
        )
    before, now = mean([each.tokens for each in first if each.tokens is not None]), step.tokens
    if before is not None and now is not None and (now > before * OTHER_LENGTH or now < before / OTHER_LENGTH):
        kind = "longer" if now > before else "shorter"
        found[kind] = f"completions became {kind}, {now:.4g} tokens after {before:.4g} in the first {FIRST} steps"
    return found


def _fall(first: Sequence[StepFigures], last: Sequence[StepFigures]) -> str:
    """By how much the reward fell; empty if it did not, or if that can be chance."""
    before, now = ([reward for each in steps for reward in each.rewards] for steps in (first, last))
    if min(len(before), len(now)) < 2:
        return ""
    error = math.sqrt(sum(statistics.variance(rewards) / len(rewards) for rewards in (before, now)))
    was, became = statistics.fmean(before), statistics.fmean(now)
    if not was - became > error:
        return ""
    return f"mean reward fell from {was:.3g} to {became:.3g}, with a standard error of {error:.2g}"
