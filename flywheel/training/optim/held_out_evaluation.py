"""Evaluation on held-out tasks and suites: two adapters answer with the same seeds and are graded by the same rubric,
and the comparison of their answers, as the gate reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import get_args

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.judge.rubric.criterion import Criterion
from flywheel.records.round import Comparison, RoundSpec, Suite, SuiteComparison
from flywheel.training.data.groups import Side, gate_rewards
from flywheel.training.data.prompts import Prompt, seed_of
from flywheel.training.data.rollout import LoadedAdapter, Rollout, RolloutBatch, RolloutRequest, add_usage
from flywheel.training.data.rollout_file import append_answer, write_answers
from flywheel.training.gate.gate import TRIPWIRES
from flywheel.training.gate.intervals import Paired, compare, compare_criterion, compare_suite
from flywheel.training.gate.tripwires import measures
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.rollout_grading import rubric_of

CUT_AFTER = 0.9
"""The share of a batch's timeout after which an answer is cut."""

Rewards = tuple[float | None, ...]
Pairs = list[tuple[Rewards, Rewards]]


@dataclass(frozen=True, slots=True)
class HeldOutAnswers:
    """The answers of candidate and deployed adapter.

    Attributes:
        rewards: For each prompt the rewards of both, one per seed; None without a verdict. Answers that ended by a
            miss, or in which the user's agent failed, have a score (`gate_rewards`).
        limits: The lowest and the highest reward.
        at_bound: The same with the deployed adapter's misses and failures at 1.
        missed: How many answers of each ended by a miss.
        failed: In how many answers of each the user's agent failed.
        values: Those of each criterion; None where it was asked and the answer is undecided. Answers to which it
            does not apply have none, as after a failed required check or a miss.
        tripwires: Those of each measure of the tripwires, where it was measured.
    """

    rewards: Pairs
    limits: tuple[float, float]
    at_bound: Pairs
    missed: tuple[int, int]
    failed: tuple[int, int]
    values: dict[str, Pairs]
    tripwires: dict[str, Pairs]
    usage: dict[str, int]


def check_enough(prompts: Sequence[Prompt], spec: RoundSpec, needed: int, suite: Suite | None = None) -> None:
    """Raise TrainError when too few held-out tasks, or tasks of a suite, can be asked for the gate to promote a
    candidate."""
    if len(prompts) >= needed:
        return
    given, more = f"its {len(spec.held_out)} held-out tasks", "Collect and judge more traces"
    if suite is not None:
        given, more = f"the {len(suite.tasks)} tasks of the suite {suite.name}", "Add tasks to its file"
    raise TrainError(
        f"train {spec.round_id}",
        f"of {given} {len(prompts)} can be asked, and gate.min_tasks is {needed}: the"
        " others leave no room for a completion, are refused by the chat template, or are the same again",
        f"{more}, raise serving.max_model_len, or lower gate.min_tasks. The log names them.",
    )


def answer_alone(
    prompts: Sequence[Prompt],
    adapter: LoadedAdapter | None,
    spec: RoundSpec,
    settings: Config,
    collector: Collector,
    directory: Path,
    *,
    at_once: int | None = None,
) -> dict[str, int]:
    """Let one adapter, or the base model, answer, and write the answers to the round's directory. Returns the usage.
    A server elsewhere has at most so many requests `at_once`."""
    asked = requests(prompts, (adapter,), spec, settings, settings.gate.samples_for(len(prompts)))
    batch = collector.collect(asked, most_open=at_once or most_open(settings))
    write_answers(directory, batch.rollouts)
    return batch.usage()


def answer(
    prompts: Sequence[Prompt],
    sides: tuple[LoadedAdapter | None, LoadedAdapter | None],
    spec: RoundSpec,
    settings: Config,
    collector: Collector,
    directory: Path,
) -> HeldOutAnswers:
    """Let both adapters answer, with about as many open requests as a training step has. None is the base model. The
    answers are written to the round's directory as they are graded.

    Undecided answers are graded once more at the end. Raises TrainError when more answers of an adapter are undecided
    than rewards of a training step may be, when the user's agent fails as often with the deployed adapter, or when
    too few tasks are left for the gate: an unreachable judge, or an agent that fails anyway, must not cause a
    rejection.
    """
    gate, samples = settings.gate, settings.gate.samples_for(len(prompts))
    writing = threading.Lock()

    def write(rollout: Rollout) -> None:
        with writing:
            append_answer(directory, rollout, candidate=sides[0])

    whole = collector.collect(
        requests(prompts, sides, spec, settings, samples),
        most_open=most_open(settings),
        on_rollout=write,
    )
    whole = collector.grade_again(whole, on_rollout=write)
    by_prompt = [whole.rollouts[at : at + samples] for at in range(0, len(whole.rollouts), samples)]
    candidate, deployed = by_side = by_prompt[::2], by_prompt[1::2]
    batches = [RolloutBatch(tuple(chain(*side))) for side in by_side]
    for side, name in zip(batches, ("candidate", "deployed adapter"), strict=True):
        side.refuse_undecided(settings.training.max_undecided_share, of=f"the {name}'s answers")
    batches[1].refuse_failed(settings.training.max_undecided_share)
    # The lowest and the highest reward: those of a rubric are within 0 and 1, those of the user's agent need not be.
    limits = min((0.0, *whole.rewards)), max((1.0, *whole.rewards))
    rewards = _scores(by_side, limits)
    decided = sum(all(set(side) - {None} for side in both) for both in rewards)
    if decided < gate.min_tasks <= len(prompts):
        kind = f"tasks of the suite {suite}" if (suite := prompts[0].task.suite) else "held-out tasks"
        raise TrainError(
            f"compare {spec.round_id} with what serves",
            f"of {len(prompts)} {kind} only {decided} have a verdict for both adapters, and gate.min_tasks is"
            f" {gate.min_tasks}; {whole.undecided} of {len(whole.rollouts)} answers are undecided",
            "Check the judge's endpoint and the worker's log; the round can be started again.",
            retryable=True,
        )
    rubric = rubric_of(spec) if spec.rubric else None
    values = {
        each.id: _pairs([[[*chain(*(_value(one, each) for one in own))] for own in side] for side in by_side])
        for each in (rubric.every if rubric is not None else ())
    }
    missed = [side.missed for side in batches]
    # What the engine failed is undecided.
    failed = [sum(not each.completion.needs_reward for each in side.rollouts) - side.missed for side in batches]
    found = measures(candidate, deployed, rubric)
    return HeldOutAnswers(
        rewards,
        limits,
        _scores(by_side, limits, at_bound=True),
        (missed[0], missed[1]),
        (failed[0], failed[1]),
        {name: own for name, own in values.items() if any(set(chain(*both)) - {None} for both in own)},
        {name: [_measured(both) for both in of_measure] for name, of_measure in found.items()},
        whole.usage(),
    )


def most_open(settings: Config) -> int:
    """How many answers engines make at a time: about as many as rollouts of a training step."""
    return settings.training.prompts_per_step * settings.training.group_size


def _value(rollout: Rollout, criterion: Criterion) -> tuple[float | None, ...]:
    """The value of a criterion for an answer; None if the judge was to decide it and has not, nothing where it does
    not apply."""
    results = rollout.verdict.results if rollout.verdict is not None else ()
    if known := [result.value for result in results if result.criterion == criterion.id]:
        return (known[0],)
    is_undecided = rollout.reward is None and rollout.completion.needs_reward
    return (None,) if is_undecided and (criterion.asks_the_judge or rollout.verdict is None) else ()


def _measured(both: tuple[Rewards, Rewards]) -> tuple[Rewards, Rewards]:
    candidate, deployed = (tuple(value for value in side if value is not None) for side in both)
    return candidate, deployed


def _scores(
    by_side: Sequence[Sequence[Sequence[Rollout]]], limits: tuple[float, float], *, at_bound: bool = False
) -> Pairs:
    """The reward of each answer, or the score of its miss or failure, given the answers of both sides by prompt."""
    found = []
    for name, side in zip(get_args(Side), by_side, strict=True):
        own = [*chain(*side)]
        missed = [not each.completion.needs_reward for each in own]
        worst, best = limits
        scores = iter(
            gate_rewards([each.reward for each in own], missed, name, at_bound=at_bound, worst=worst, best=best)
        )
        found.append([[*islice(scores, len(answers))] for answers in side])
    return _pairs(found)


def _pairs(by_side: Sequence[Sequence[Sequence[float | None]]]) -> Pairs:
    """The values of both sides, prompt by prompt."""
    candidate, deployed = ([tuple(values) for values in side] for side in by_side)
    return list(zip(candidate, deployed, strict=True))


def requests(
    prompts: Sequence[Prompt],
    sides: Sequence[LoadedAdapter | None],
    spec: RoundSpec,
    settings: Config,
    samples: int,
) -> list[RolloutRequest]:
    """For each prompt, the requests of each adapter, sampled as the server does and within its limits. A sample's
    seed depends on task and number, not on the adapter. A suite's task has other seeds than a held-out one of the
    same id, so that stored answers are never taken for each other's."""
    return [
        RolloutRequest(
            prompt=prompt,
            group=group,
            seed=seed_of(spec.seed, "suite" if prompt.task.suite else "held-out", prompt.task.task_id, sample),
            temperature=settings.gate.temperature,
            max_tokens=None,
            adapter=side,
            as_served=True,
            # Slightly before the timeout of the whole batch: a cut answer is graded as it is. The user's agent has a
            # time limit of its own.
            seconds=CUT_AFTER * settings.rollout.timeout_seconds,
        )
        for group, prompt in enumerate(prompts)
        for side in sides
        for sample in range(samples)
    ]


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
        gate, seed, paired = self._settings.gate, self._spec.seed, partial(_by_task, prompts)
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
        return compare_suite(suite.name, _by_task(prompts, answers.rewards), confidence=confidence, seed=seed)

    def _answers(self, prompts: list[Prompt], suite: Suite | None, sides: Sides) -> HeldOutAnswers:
        with self._collector(suite) as collector:
            answers = answer(prompts, sides, self._spec, self._settings, collector, self._directory)
        self.usage = add_usage(self.usage, answers.usage)
        return answers


def _by_task(prompts: Sequence[Prompt], pairs: Pairs) -> list[Paired]:
    return [
        Paired(prompt.task.task_id, *sides, prompt.task.conversation)
        for prompt, sides in zip(prompts, pairs, strict=True)
    ]
