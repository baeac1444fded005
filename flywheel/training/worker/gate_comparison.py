"""The comparison of a round's adapter with the deployed one on held-out tasks and suites, as the gate reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from flywheel.config.file import Config
from flywheel.records.round import Comparison, RoundSpec, Suite, SuiteComparison
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import LoadedAdapter, add_usage
from flywheel.training.gate.gate import TRIPWIRES
from flywheel.training.gate.intervals import Paired, compare, compare_criterion, compare_suite
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.held_out_evaluation import HeldOutAnswers, Pairs, answer
from flywheel.training.optim.rollout_grading import rubric_of

Sides = tuple[LoadedAdapter, LoadedAdapter | None]
"""The candidate and the deployed adapter; None is the base model."""


class GateComparison:
    """`collector` makes one for the round's tasks, or for a suite."""

    def __init__(
        self, spec: RoundSpec, settings: Config, directory: Path, collector: Callable[[Suite | None], Collector]
    ) -> None:
        self._spec, self._settings, self._directory, self._collector = spec, settings, directory, collector
        self.usage: dict[str, int] = {}

    def answers(self, prompts: list[Prompt], suites: Sequence[tuple[Suite, list[Prompt]]]) -> int:
        """How many it compares, those of suites included."""
        compared = [prompts, *(of_suite for _, of_suite in suites)]
        return sum(2 * self._settings.gate.samples_for(len(each)) * len(each) for each in compared)

    def of(self, prompts: list[Prompt], suites: Sequence[tuple[Suite, list[Prompt]]], sides: Sides) -> Comparison:
        """The comparison on the prompts and on those of each suite. Raises TrainError."""
        gate, seed, paired = self._settings.gate, self._spec.seed, partial(_paired, prompts)
        assert self._spec.test is not None
        answers = self._answers(prompts, None, sides)
        compared = partial(
            compare,
            samples=gate.samples_for(len(prompts)),
            alpha=self._spec.test.alpha,
            needed=gate.min_gain,
            seed=seed,
            limits=answers.limits,
        )
        whole, (candidate_missed, deployed_missed) = compared(paired(answers.rewards)), answers.missed
        candidate_failed, deployed_failed = answers.failed
        at_bound = compared(paired(answers.at_bound)) if deployed_missed or deployed_failed else None
        by_measure = partial(compare_criterion, confidence=gate.confidence, seed=seed)
        criteria = [
            by_measure(criterion.id, paired(answers.values[criterion.id]), takes_away=criterion.weight < 0)
            for criterion in (rubric_of(self._spec).every if answers.values else ())
            if criterion.id in answers.values
        ]
        tripwires = [by_measure(name, paired(answers.tripwires[name]), takes_away=False) for name in TRIPWIRES]
        return whole.model_copy(
            update={
                "criteria": criteria,
                # What no answer tells is not listed.
                "tripwires": [each for each in tripwires if each.tasks],
                "suites": [self._of_suite(*each, sides) for each in suites],
                "candidate_missed": candidate_missed,
                "deployed_missed": deployed_missed,
                "candidate_failed": candidate_failed,
                "deployed_failed": deployed_failed,
                "lower_at_bound": at_bound and at_bound.lower,
            }
        )

    def _of_suite(self, suite: Suite, prompts: list[Prompt], sides: Sides) -> SuiteComparison:
        answers = self._answers(prompts, suite, sides)
        confidence, seed = self._settings.gate.confidence, self._spec.seed
        return compare_suite(suite.name, _paired(prompts, answers.rewards), confidence=confidence, seed=seed)

    def _answers(self, prompts: list[Prompt], suite: Suite | None, sides: Sides) -> HeldOutAnswers:
        with self._collector(suite) as collector:
            answers = answer(prompts, sides, self._spec, self._settings, collector, self._directory)
        self.usage = add_usage(self.usage, answers.usage)
        return answers


def _paired(prompts: Sequence[Prompt], pairs: Pairs) -> list[Paired]:
    return [
        Paired(prompt.task.task_id, *sides, prompt.task.conversation)
        for prompt, sides in zip(prompts, pairs, strict=True)
    ]
