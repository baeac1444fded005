"""The rollouts of a round, step by step: which prompts each step asks, which replace groups with many misses.

A round whose tasks give nothing to learn is refused. A debug round has the same steps and trains nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from flywheel.config.file import Config
from flywheel.config.training import AgentProgramSettings, Quantization, RolloutSettings
from flywheel.errors import TrainError
from flywheel.records.round import RoundSpec
from flywheel.system.terminal import quantity
from flywheel.training.data.graded_rollouts import StoredSteps, restored_batch
from flywheel.training.data.groups import MIN_RANGE, Reserve, growing_misses
from flywheel.training.data.prompts import Prompt, schedule, seed_of
from flywheel.training.data.rollout import LoadedAdapter, RolloutBatch, RolloutRequest, add_usage
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


@dataclass(frozen=True, slots=True)
class DebugRun:
    steps: int
    reward_first: float | None
    reward_last: float | None
    summary: str
    usage: dict[str, int]
    system_prompts: Mapping[str, int]


def roll_out_only(
    spec: RoundSpec,
    settings: Config,
    directory: Path,
    prompts: Sequence[Prompt],
    collector: Collector,
    adapter: LoadedAdapter | None,
    meter: Meter,
) -> DebugRun:
    """The first steps of a round, as many as it needs to see whether anything can be learned."""
    steps = min(FIRST_LOOK, settings.training.steps)
    batches = list(roll_out(spec, settings, directory, prompts, collector, adapter, meter, steps=steps))
    means = [batch.summary()["reward_mean"] for batch in batches]
    usage: dict[str, int] = {}
    system_prompts: Counter[str] = Counter()
    for batch in batches:
        usage = add_usage(usage, batch.usage())
        system_prompts += batch.system_prompts
    return DebugRun(len(batches), means[0], means[-1], _summary(batches, settings.rollout), usage, system_prompts)


def roll_out(
    spec: RoundSpec,
    settings: Config,
    directory: Path,
    prompts: Sequence[Prompt],
    collector: Collector,
    adapter: LoadedAdapter | None,
    meter: Meter,
    *,
    steps: int,
    before: int = 0,
    **figures: str,
) -> Iterator[RolloutBatch]:
    """The rollouts of the first `steps` of `training.steps`, between which nothing is trained. Rollouts, metrics and
    progress are written as those of steps behind `before`; `figures` are in each line of the metrics."""
    training = settings.training
    round_steps = RoundSteps(spec, settings, prompts, collector, StoredSteps(directory, before))
    metrics = Metrics(directory)
    meter.enter("training", round_steps.asked * training.group_size, steps=before + steps)
    for step in range(steps):
        batch = round_steps.collect(step, adapter)
        number, summary = before + step + 1, batch.summary()
        meter.stepped(number, summary["reward_mean"], collecting_seconds=sum(batch.seconds.values()))
        of_step = {"temperature": settings.rollout.temperature, "seconds": batch.seconds, **figures}
        metrics.step(number, before + steps, {**summary, **of_step})
        yield batch


def _summary(batches: Sequence[RolloutBatch], rollout: RolloutSettings) -> str:
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
    """Collects the rollouts of each step. Its prompts depend on the seed and on which groups were dropped."""

    def __init__(
        self,
        spec: RoundSpec,
        settings: Config,
        prompts: Sequence[Prompt],
        collector: Collector,
        stored: StoredSteps | None = None,
    ) -> None:
        """Steps that are `stored` are read, and others are stored there when they are complete."""
        self._spec, self._settings, self._prompts, self._collector = spec, settings, prompts, collector
        self._stored = stored
        self._changed = threading.Condition()
        self._next, self._has_failed = 0, False
        training = settings.training
        self.asked = settings.rollout.prompts_asked(training.prompts_per_step)
        """Number of prompts that are planned for a step."""
        self._plan = schedule(len(prompts), per_step=self.asked, steps=training.steps, seed=spec.seed)
        self._reserve = Reserve(self._plan, len(prompts), spec.seed)

    def is_stored(self, step: int) -> bool:
        """Whether an earlier worker has collected the step."""
        return self._stored is not None and step in self._stored

    def collect(
        self, step: int, adapter: LoadedAdapter | None, *, on_generated: Callable[[], None] = lambda: None
    ) -> RolloutBatch:
        """The rollouts of a step, counted from 0. `on_generated` is called when engines have generated those of the
        planned prompts. A step may be collected in another thread while the one before is not complete.

        Groups that are dropped for their misses are replaced by prompts of the reserve, unless enough others are
        left. Replacements are not replaced again. Raises TrainError and the judge's errors.
        """
        try:
            planned = self._collect(self._plan[step], step, 0, adapter, on_generated)
            with self._changed:
                # Which prompts replace others depends on all steps before.
                self._changed.wait_for(lambda: self._next >= step or self._has_failed)
                if self._has_failed:
                    raise RuntimeError(f"a step before step {step + 1} failed")
            batch = self._with_replacements(step, planned, adapter)
            self._store(step, batch)
        except BaseException:
            with self._changed:
                self._has_failed = True
                self._changed.notify_all()
            raise
        with self._changed:
            self._next = step + 1
            self._changed.notify_all()
        return batch

    def _with_replacements(self, step: int, batch: RolloutBatch, adapter: LoadedAdapter | None) -> RolloutBatch:
        planned, most = self._plan[step], self._settings.training.prompts_per_step
        batch = replace(batch, most_groups=most)
        missing = [planned[group] for group, why in batch.dropped.items() if why == "misses"]
        taken = list(planned)
        for index in missing:
            if batch.groups_with_spread >= most:
                self._reserve.drop(index)
            elif (found := self._reserve.replace(step, index, taken)) is not None:
                taken.append(found)
        if len(taken) == len(planned):
            return batch
        replacements = taken[len(planned) :]
        more = self._collect(replacements, step, len(planned), adapter)
        for group, why in more.dropped.items():
            if why == "misses":
                self._reserve.drop(taken[group])
        seconds = {part: batch.seconds.get(part, 0.0) + further for part, further in more.seconds.items()}
        rollouts = (*batch.rollouts, *more.rollouts)
        lost = batch.lost + more.lost
        return RolloutBatch(rollouts, seconds, most, len(replacements), more.generated_at, lost)

    def _store(self, step: int, batch: RolloutBatch) -> None:
        if self._stored is None or step in self._stored:
            return
        is_usable = self._is_usable(batch)
        self._stored.append(step, batch, self._settings.training.scale_rewards, is_usable=is_usable)
        if is_usable:
            self._collector.forget(batch)

    def _is_usable(self, batch: RolloutBatch) -> bool:
        """Whether a further worker may go on with it. A step that fails for its undecided rewards is judged again."""
        limit = self._settings.training.max_undecided_share
        try:
            batch.refuse_failed(limit)
            batch.refuse_undecided(limit)
        except TrainError:
            return False
        return bool(batch.rewards) or not batch.undecided

    def miss_shares(self, batch: RolloutBatch, *, of_calling: bool = False) -> list[float]:
        """The share of rollouts, or of those that called a tool, that ended by a miss, in each planned group that has
        any. The reserve prefers prompts with few misses, so replacements say nothing of how the share develops."""
        of_group: dict[int, list[bool]] = {}
        for rollout in batch.rollouts:
            is_asked = rollout.request.group < self.asked and rollout.request.prompt.task.agent == "recorded"
            if is_asked and rollout.missed is not None and (rollout.completion.has_called or not of_calling):
                of_group.setdefault(rollout.request.group, []).append(rollout.missed)
        return [sum(missed) / len(missed) for missed in of_group.values()]

    def _collect(
        self,
        indices: Sequence[int],
        step: int,
        first: int,
        adapter: LoadedAdapter | None,
        on_generated: Callable[[], None] = lambda: None,
    ) -> RolloutBatch:
        prompts = [self._prompts[index] for index in indices]
        requests = step_requests(prompts, step, self._spec, self._settings, adapter, first=first)
        if self._stored is not None and step in self._stored:
            return restored_batch(self._stored.lines(step), requests, self._collector.weights)
        return self._collector.collect(requests, order=step, on_generated=on_generated)


def step_requests(
    prompts: Sequence[Prompt],
    step: int,
    spec: RoundSpec,
    settings: Config,
    adapter: LoadedAdapter | None,
    *,
    first: int = 0,
) -> list[RolloutRequest]:
    """The requests of one step, group by group; `first` is the number of the first group. Each has its own seed,
    reproducible for the round."""
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
        for group, prompt in enumerate(prompts, first)
        for sample in range(settings.training.group_size)
    ]
