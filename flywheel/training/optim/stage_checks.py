"""What ends a stage of GRPO: rollouts or updates that show that nothing can be learned, or that it goes wrong.

A policy that collapses has lost its entropy, or its completions have another length by far, and its reward falls.
One that becomes right loses entropy, too (arXiv 2505.22617 has reward as a function of entropy), and may answer more
briefly. So neither ends a round as long as the reward does not fall. A collapse within the first two steps, with
which the others are compared, is not found. The divergence from the reference policy does not count: no published
bound holds for different models and tasks.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.config.file import Config
from flywheel.config.training import AgentProgramSettings, Quantization, RolloutSettings
from flywheel.errors import TrainError
from flywheel.system.terminal import quantity
from flywheel.training.data.groups import MIN_RANGE, growing_misses, means_of
from flywheel.training.data.rollout import RolloutBatch, mean
from flywheel.training.data.samples import TrainingRow

log = logging.getLogger("flywheel.training.worker")

FIRST_LOOK: Final = 2
"""Number of first steps without different rewards after which a round is refused; one could be chance."""
MOST_UNTRAINED: Final = 3
"""Number of successive steps without a token to train after which training ends. One or two could be chance."""
WIDEST_GAP: Final = 0.2
"""The largest `logprob_gap`, in nats, of the first step of a round whose trainer has a quantised base model.

The same weights in bfloat16 differ by about 0.05 between engine and trainer (SmolLM2-135M at temperature 1). At 0.2
the probability ratio of an average token is off by a factor of 1.2, the default clip range, before anything was
learned: from there on, corrections and clipping are about the quantisation and no longer about the policy.
"""
FIRST: Final = 2
"""Number of first steps that the others are compared with."""
IN_A_ROW: Final = 3
"""Number of successive steps with a sign of collapse that end a round whose reward falls."""
LOW_ENTROPY: Final = 0.2
"""Share of the first steps' entropy below which it is a sign. Chosen, not derived, as is the next one."""
OTHER_LENGTH: Final = 3.0
"""Factor by which completions are longer or shorter than in the first steps from which it is a sign."""


class RoundRefusedError(Exception):
    """Nothing can be learned in this round, or its policy has collapsed; the message says why."""


class UntrainedError(RoundRefusedError):
    """Steps in a row had no token to train. The adapter is that of the step before them, if there was one."""


class CollapsedError(RoundRefusedError):
    """The last three steps had a policy that has collapsed."""


class StageChecks:
    """Of one stage, whose steps it is told in their order."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._first: list[RolloutBatch] = []
        self.misses: list[list[float]] = []
        """The share of misses of each group of each step."""
        self._misses_of_calling: list[list[float]] = []
        self._collapse = CollapseWatch()
        self._gap: float | None = None
        """The `logprob_gap` of the first step that was trained on."""
        self.untrained = ""
        """The last step without a token to train, and why it had none."""
        self.untrained_in_a_row = 0

    def rolled_out(self, batch: RolloutBatch) -> None:
        """A step has these rollouts. Raises RoundRefusedError and TrainError."""
        training = self._settings.training
        batch.refuse_failed(training.max_undecided_share)
        batch.refuse_undecided(training.max_undecided_share)
        if len(self._first) < FIRST_LOOK:
            self._first.append(batch)
            if len(self._first) == min(FIRST_LOOK, training.steps):
                refuse_without_spread(self._first, training.min_spread_share, self._settings.rollout)
        self.misses.append(miss_shares(batch))
        self._misses_of_calling.append(miss_shares(batch, of_calling=True))
        # They must have grown among rollouts that called a tool, too: a policy that learns to call has more misses,
        # although its arguments are no worse.
        if (reason := growing_misses(self.misses)) and growing_misses(self._misses_of_calling):
            raise RoundRefusedError(reason)

    def begun(self, number: int, batch: RolloutBatch, rows: Sequence[TrainingRow]) -> None:
        """The step of this number trains on these rows."""
        self.untrained_in_a_row = 0 if rows else self.untrained_in_a_row + 1
        if not rows:
            self.untrained = f"step {number} has no token to train: {why_untrained(batch, self._settings)}"
            log.warning("%s; it counts as no step", self.untrained)

    def trained(self, batch: RolloutBatch, figures: Mapping[str, float]) -> None:
        """The step is complete, with these figures. Raises RoundRefusedError and TrainError."""
        if self._gap is None:
            self._gap = figures.get("logprob_gap")
            refuse_wide_gap(self._gap, self._settings.model.trainer_quantization)
        self._collapse.rolled_out(figures.get("entropy"), batch)
        if self.untrained_in_a_row == MOST_UNTRAINED:
            raise UntrainedError(f"{self.untrained}; training ended after {MOST_UNTRAINED} such steps in a row")

    def recalled(self, batch: RolloutBatch, entropy: float | None) -> None:
        """An earlier worker has completed the step, which was within all limits. Raises CollapsedError."""
        if not self.untrained_in_a_row:
            # Without a token, it was not measured.
            self._gap = 0.0
        self._collapse.rolled_out(entropy, batch)


def refuse_without_spread(batches: Sequence[RolloutBatch], min_share: float, rollout: RolloutSettings) -> None:
    """Raise RoundRefusedError when too few groups have few misses and rewards that differ: the others are dropped.

    Raises TrainError when the judge gave no reward at all, in which case the tasks can be used by another round.
    """
    groups = sum(batch.groups for batch in batches)
    if sum(batch.groups_with_spread for batch in batches) > min_share * groups:
        return
    missed = sum(batch.missed for batch in batches)
    if not any(batch.rewards for batch in batches) and sum(batch.undecided for batch in batches) >= missed:
        raise TrainError(
            "learn from the first steps of the round",
            "no rollout has a reward",
            "Check the judge's endpoint and the worker's log; the round can be started again.",
            retryable=True,
        )
    raise RoundRefusedError(f"nothing can be learned in the first steps: {_why_dropped(batches, rollout)}")


def _why_dropped(batches: Sequence[RolloutBatch], rollout: RolloutSettings) -> str:
    """How many groups can be trained on, and what may be wrong with the others."""
    groups = sum(batch.groups for batch in batches)
    spread = sum(batch.groups_with_spread for batch in batches)
    rewards = [reward for batch in batches for reward in batch.rewards]
    seen = f"rewards from {min(rewards):g} to {max(rewards):g}" if rewards else "no rewards"
    dropped = Counter(why for batch in batches for why in batch.dropped.values())
    if dropped["misses"]:
        missed, total = sum(batch.missed for batch in batches), sum(len(batch.rollouts) for batch in batches)
        return (
            f"{spread} of {groups} groups can be trained on ({seen});"
            f" {dropped['misses']} were dropped because {missed} of {total} rollouts ended at a call without a"
            " recorded result: the policy calls tools differently from the traces (rollout.tools)"
        )
    found, agent = [f"{spread} of {groups} groups have rewards that differ ({seen})"], rollout.agent
    if dropped["spread"] and rollout.weights.workflow and isinstance(agent, AgentProgramSettings):
        alike = [batch.rewards_of_groups[group] for batch in batches for group in batch.without_spread]
        widest = max(max(rewards) - min(rewards) for rewards in alike)
        by = rollout.reward_function or agent.workflow or " ".join(agent.command or ())
        if widest:
            least = MIN_RANGE * batches[0].reward_range
            found.append(
                f"of the others, the largest range in a group is {widest:.3g}, where less than {least:.3g} counts as"
                f" none: set rollout.reward.range ({rollout.weights.range:g}) to that of the rewards of {by}"
            )
        else:
            found.append(f"{by} rewards all runs of each other task alike: the tasks may be too easy or too hard")
    if dropped["spread"] and rollout.weights.rubric:
        found.append("the rubric may be too easy or too hard for these tasks")
    return "; ".join(found)


def why_untrained(batch: RolloutBatch, settings: Config) -> str:
    """Why a step with these rollouts has no token to train."""
    cut, masks = sum(each.completion.truncated for each in batch.rollouts), settings.training.mask_truncated
    left_out = " and are left out (training.mask_truncated)" if cut and masks else ""
    limit = f"{cut} of {len(batch.rollouts)} rollouts reached a limit of tokens, turns or time{left_out}"
    return f"{_why_dropped([batch], settings.rollout)}; {limit}"


def refuse_wide_gap(gap: float | None, quantization: Quantization | None) -> None:
    """Raise TrainError when the quantised base differs too much from the engines' base. `gap` is in nats."""
    if quantization is not None and gap is not None and not gap <= WIDEST_GAP:
        raise TrainError(
            f"train on a quantised base model (model.trainer_quantization: {quantization})",
            f"log-probabilities of trainer and engine differ by {gap:.3f} in the first step (logprob_gap), which is"
            f" more than {WIDEST_GAP:g}",
            f"{'Set it to 8bit, or remove it' if quantization == '4bit' else 'Remove it'}.",
        )


def found_to_learn(batches: Sequence[RolloutBatch], rollout: RolloutSettings) -> str:
    """How many groups a round would train on, and what happened to the others."""

    def total(figure: Callable[[RolloutBatch], int]) -> int:
        return sum(map(figure, batches))

    spread, groups = total(lambda batch: batch.groups_with_spread), total(lambda batch: batch.groups)
    undecided, missed = total(lambda batch: batch.undecided), total(lambda batch: batch.missed)
    dropped = total(lambda batch: list(batch.dropped.values()).count("misses"))
    differ = f"{spread} of {groups} groups have rewards that differ" if spread else _why_dropped(batches, rollout)
    parts = [differ, f"{undecided} rollouts are undecided"]
    if missed:
        parts.append(
            f"{missed} of {total(lambda batch: len(batch.rollouts))} ended at a call without a recorded result,"
            f" which drops {quantity(dropped, 'group')}"
        )
    if failed := total(lambda batch: batch.failed.total()):
        parts.append(f"the agent failed in {failed}")
    return "; ".join(parts)


def miss_shares(batch: RolloutBatch, *, of_calling: bool = False) -> list[float]:
    """The share of rollouts, or of those that called a tool, that ended by a miss, in each group that has any."""
    of_group: dict[int, list[bool]] = {}
    for rollout in batch.rollouts:
        is_recorded = rollout.request.prompt.task.agent == "recorded"
        if is_recorded and rollout.missed is not None and (rollout.completion.has_called or not of_calling):
            of_group.setdefault(rollout.request.group, []).append(rollout.missed)
    return [sum(missed) / len(missed) for missed in of_group.values()]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Of one step: mean entropy in nats and mean length of completions in tokens, None if unknown, and the mean
    reward of each group of rollouts."""

    entropy: float | None
    tokens: float | None
    rewards: Sequence[float]


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
    found = means_of(*([reward for each in steps for reward in each.rewards] for steps in (first, last)))
    if found is None or not found[0] - found[1] > found[2]:
        return ""
    was, became, error = found
    return f"mean reward fell from {was:.3g} to {became:.3g}, with a standard error of {error:.2g}"
