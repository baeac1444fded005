"""The rollouts of a round, step by step: which prompts each step asks, and what ends a round.

A round whose tasks give nothing to learn is refused. A debug round has the same steps and trains nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from flywheel.config.file import Config
from flywheel.config.training import AgentProgramSettings, Quantization, RolloutSettings
from flywheel.errors import TrainError
from flywheel.records.round import RoundSpec
from flywheel.system.terminal import quantity
from flywheel.training.data.graded_rollouts import StoredSteps, restored_batch
from flywheel.training.data.groups import MIN_RANGE, growing_misses
from flywheel.training.data.prompts import Prompt, schedule, seed_of
from flywheel.training.data.rollout import LoadedAdapter, RolloutBatch, RolloutRequest
from flywheel.training.data.round_progress import Meter, Metrics
from flywheel.training.optim.collector import Collector

FIRST_LOOK = 2
"""Number of first steps without different rewards after which a round is refused; one could be chance."""


MOST_UNTRAINED: Final = 3
"""Number of successive steps without a token to train after which training ends. One or two could be chance."""
WIDEST_GAP: Final = 0.2
"""The largest `logprob_gap`, in nats, of the first step of a round whose trainer has a quantised base model.

The same weights in bfloat16 differ by about 0.05 between engine and trainer (SmolLM2-135M at temperature 1). At 0.2
the probability ratio of an average token is off by a factor of 1.2, the default clip range, before anything was
learned: from there on, corrections and clipping are about the quantisation and no longer about the policy.
"""


class RoundRefusedError(Exception):
    """Nothing can be learned in this round, or its policy has collapsed; the message says why."""


class UntrainedError(RoundRefusedError):
    """Steps in a row had no token to train. The adapter is that of the step before them, if there was one."""


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


def refuse_growing_misses(shares: Sequence[Sequence[float]], of_calling: Sequence[Sequence[float]]) -> None:
    """Raise RoundRefusedError when the share of misses grew over the steps, given that of each group of each step.

    It must have grown among rollouts that called a tool, too: a policy that learns to call has more misses, although
    its arguments are no worse.
    """
    if (reason := growing_misses(shares)) and growing_misses(of_calling):
        raise RoundRefusedError(reason)


def roll_out(
    steps: RoundSteps, adapter: LoadedAdapter | None, meter: Meter, *, count: int, **figures: str
) -> Iterator[RolloutBatch]:
    """The rollouts of the first `count` steps, between which nothing is trained, with their lines of metrics, in each
    of which are the `figures`."""
    metrics, before = Metrics(steps.directory), steps.before
    meter.enter("training", steps.count, steps=before + count)
    for step in range(count):
        batch = steps.graded(step, steps.generate(step, adapter))
        number, summary = before + step + 1, batch.summary()
        meter.stepped(number, summary["reward_mean"])
        of_step = {"temperature": steps.settings.rollout.temperature, "seconds": batch.seconds, **figures}
        metrics.step(number, before + count, {**summary, **of_step})
        yield batch


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


class RoundSteps:
    """The rollouts of each step, which counts from 0. Its prompts depend on the seed alone."""

    def __init__(
        self,
        spec: RoundSpec,
        settings: Config,
        directory: Path,
        prompts: Sequence[Prompt],
        collector: Collector,
        before: int = 0,
    ) -> None:
        """Steps that are stored are read, and others are stored when they are complete. Earlier stages took so many
        steps `before`."""
        self.settings, self.directory, self.before = settings, directory, before
        self.stored = StoredSteps(directory, before)
        self._spec, self._prompts, self._collector = spec, prompts, collector
        training = settings.training
        self._asked = settings.rollout.prompts_asked(training.prompts_per_step)
        self._plan = schedule(len(prompts), per_step=self._asked, steps=training.steps, seed=spec.seed)

    @property
    def count(self) -> int:
        """Number of rollouts of a step."""
        return self._asked * self.settings.training.group_size

    def generate(self, step: int, adapter: LoadedAdapter | None) -> Callable[[], RolloutBatch]:
        """Let engines generate the rollouts of a step. Returns what waits until they are graded."""
        requests = self._requests(step, adapter)
        if step in self.stored:
            return partial(restored_batch, self.stored.lines(step), requests, self._collector.weights)
        return self._collector.generate(requests, order=step)

    def graded(self, step: int, generated: Callable[[], RolloutBatch]) -> RolloutBatch:
        """The graded rollouts of a step, which are stored from now on. Raises TrainError and the judge's errors."""
        batch = replace(generated(), most_groups=self.settings.training.prompts_per_step)
        if step not in self.stored:
            is_usable = self._is_usable(batch)
            self.stored.append(step, batch, self.settings.training.scale_rewards, is_usable=is_usable)
            if is_usable:
                self._collector.forget(batch)
        return batch

    def _requests(self, step: int, adapter: LoadedAdapter | None) -> list[RolloutRequest]:
        prompts = [self._prompts[index] for index in self._plan[step]]
        return step_requests(prompts, step, self._spec, self.settings, adapter)

    def _is_usable(self, batch: RolloutBatch) -> bool:
        """Whether a further worker may go on with it. A step that fails for its undecided rewards is judged again."""
        limit = self.settings.training.max_undecided_share
        try:
            batch.refuse_failed(limit)
            batch.refuse_undecided(limit)
        except TrainError:
            return False
        return bool(batch.rewards) or not batch.undecided


def miss_shares(batch: RolloutBatch, *, of_calling: bool = False) -> list[float]:
    """The share of rollouts, or of those that called a tool, that ended by a miss, in each group that has any."""
    of_group: dict[int, list[bool]] = {}
    for rollout in batch.rollouts:
        is_recorded = rollout.request.prompt.task.agent == "recorded"
        if is_recorded and rollout.missed is not None and (rollout.completion.has_called or not of_calling):
            of_group.setdefault(rollout.request.group, []).append(rollout.missed)
    return [sum(missed) / len(missed) for missed in of_group.values()]


def step_requests(
    prompts: Sequence[Prompt], step: int, spec: RoundSpec, settings: Config, adapter: LoadedAdapter | None
) -> list[RolloutRequest]:
    """The requests of one step, group by group. Each has its own seed, reproducible for the round."""
    return [
        RolloutRequest(
            prompt=prompt,
            group=group,
            seed=seed_of(spec.seed, "rollout", step, group, sample),
            temperature=settings.rollout.temperature,
            max_tokens=prompt.max_tokens,
            adapter=adapter,
            max_turn_tokens=settings.rollout.max_turn_tokens,
        )
        for group, prompt in enumerate(prompts)
        for sample in range(settings.training.group_size)
    ]
