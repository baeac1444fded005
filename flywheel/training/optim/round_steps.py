"""The rollouts of a round, step by step: which prompts each step asks.

A debug round has the same steps and trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.records.round import RoundSpec
from flywheel.training.data.graded_rollouts import StoredSteps, restored_batch
from flywheel.training.data.prompts import Prompt, schedule, seed_of
from flywheel.training.data.rollout import LoadedAdapter, RolloutBatch, RolloutRequest
from flywheel.training.data.round_progress import Meter, Metrics
from flywheel.training.optim.collector import Collector


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
