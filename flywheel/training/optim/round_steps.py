"""The rollouts of a round, step by step: which prompts each step asks, and which replace groups with many misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flywheel.config import Config
from flywheel.records.round import RoundSpec
from flywheel.training.data.misses import Reserve
from flywheel.training.data.prompts import Prompt, schedule, seed_of
from flywheel.training.data.rollout import Batch, LoadedAdapter, RolloutRequest
from flywheel.training.optim.collector import Collector


class RoundSteps:
    """Collects the rollouts of each step. Its prompts depend on the seed and on which groups were dropped."""

    def __init__(self, spec: RoundSpec, settings: Config, prompts: Sequence[Prompt], collector: Collector) -> None:
        self._spec, self._settings, self._prompts, self._collector = spec, settings, prompts, collector
        training = settings.training
        self.asked = settings.rollout.prompts_asked(training.prompts_per_step)
        """Number of prompts that are planned for a step."""
        self._plan = schedule(len(prompts), per_step=self.asked, steps=training.steps, seed=spec.seed)
        self._reserve = Reserve(self._plan, len(prompts), spec.seed)

    def collect(self, step: int, adapter: LoadedAdapter | None) -> Batch:
        """The rollouts of a step, counted from 0.

        Groups that are dropped for their misses are replaced by prompts of the reserve, unless enough others are
        left. Replacements are not replaced again. Raises TrainError and the judge's errors.
        """
        planned, most = self._plan[step], self._settings.training.prompts_per_step
        batch = replace(self._collect(planned, step, 0, adapter), most_groups=most)
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
        return Batch((*batch.rollouts, *more.rollouts), seconds, most, replaced=len(replacements))

    def miss_shares(self, batch: Batch, *, of_calling: bool = False) -> list[float]:
        """The share of rollouts, or of those that called a tool, that ended by a miss, in each planned group that has
        any. The reserve prefers prompts with few misses, so replacements say nothing of how the share develops."""
        of_group: dict[int, list[bool]] = {}
        for rollout in batch.rollouts:
            is_asked = rollout.request.group < self.asked and rollout.request.prompt.task.agent == "recorded"
            if is_asked and rollout.missed is not None and (rollout.completion.has_called or not of_calling):
                of_group.setdefault(rollout.request.group, []).append(rollout.missed)
        return [sum(missed) / len(missed) for missed in of_group.values()]

    def _collect(self, indices: Sequence[int], step: int, first: int, adapter: LoadedAdapter | None) -> Batch:
        prompts = [self._prompts[index] for index in indices]
        return self._collector.collect(step_requests(prompts, step, self._spec, self._settings, adapter, first=first))


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
        )
        for group, prompt in enumerate(prompts, first)
        for sample in range(settings.training.group_size)
    ]
