"""Evaluation on held-out tasks: two adapters answer with the same seeds and are graded by the same rubric."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar, get_args

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.judge.rubric.criterion import Criterion
from flywheel.records.round import RoundSpec, Suite
from flywheel.training.data.groups import Side, gate_rewards
from flywheel.training.data.prompts import Prompt, seed_of
from flywheel.training.data.rollout import LoadedAdapter, Rollout, RolloutBatch, RolloutRequest
from flywheel.training.data.rollout_file import append_answer, write_answers
from flywheel.training.gate.tripwires import measures
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.rollout_grading import rubric_of

CUT_AFTER = 0.9
"""The share of a batch's timeout after which an answer is cut."""

Rewards = tuple[float | None, ...]
Pairs = list[tuple[Rewards, Rewards]]
Value = TypeVar("Value")


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
) -> dict[str, int]:
    """Let one adapter, or the base model, answer, and write the answers to the round's directory. Returns the
    usage."""
    asked = requests(prompts, (adapter,), spec, settings, settings.gate.samples_for(len(prompts)))
    batch = collector.collect(asked, most_open=most_open(settings))
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
    rollouts = whole.rollouts
    of_sides = [RolloutBatch(tuple(rollouts[place] for place in own)) for own in _places(len(rollouts), samples)]
    for side, name in zip(of_sides, ("candidate", "deployed adapter"), strict=True):
        side.refuse_undecided(settings.training.max_undecided_share, of=f"the {name}'s answers")
    of_sides[1].refuse_failed(settings.training.max_undecided_share)
    pairs = _paired(_scores(rollouts, samples), samples)
    decided = sum(all(set(side) - {None} for side in sides) for sides in pairs)
    if decided < gate.min_tasks <= len(prompts):
        kind = f"tasks of the suite {suite}" if (suite := prompts[0].task.suite) else "held-out tasks"
        raise TrainError(
            f"compare {spec.round_id} with what serves",
            f"of {len(prompts)} {kind} only {decided} have a verdict for both adapters, and gate.min_tasks is"
            f" {gate.min_tasks}; {whole.undecided} of {len(rollouts)} answers are undecided",
            "Check the judge's endpoint and the worker's log; the round can be started again.",
            retryable=True,
        )
    rubric = rubric_of(spec) if spec.rubric else None
    values = {
        criterion.id: _flat(_paired([_value(rollout, criterion) for rollout in rollouts], samples))
        for criterion in (rubric.every if rubric is not None else ())
    }
    candidate, deployed = (
        [side.rollouts[at : at + samples] for at in range(0, len(side.rollouts), samples)] for side in of_sides
    )
    at_bound = _paired(_scores(rollouts, samples, at_bound=True), samples)
    missed = [side.missed for side in of_sides]
    # What the engine failed is undecided.
    failed = [sum(not each.completion.needs_reward for each in side.rollouts) - side.missed for side in of_sides]
    found = measures(candidate, deployed, rubric)
    return HeldOutAnswers(
        pairs,
        _limits(rollouts),
        at_bound,
        (missed[0], missed[1]),
        (failed[0], failed[1]),
        {name: of_criterion for name, of_criterion in values.items() if _is_known(of_criterion)},
        {name: [_measured(sides) for sides in of_measure] for name, of_measure in found.items()},
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


def _flat(pairs: Sequence[tuple[tuple[Rewards, ...], ...]]) -> Pairs:
    return [(tuple(chain(*candidate)), tuple(chain(*deployed))) for candidate, deployed in pairs]


def _measured(sides: tuple[Rewards, Rewards]) -> tuple[Rewards, Rewards]:
    candidate, deployed = (tuple(value for value in side if value is not None) for side in sides)
    return candidate, deployed


def _is_known(pairs: Pairs) -> bool:
    return any(value is not None for sides in pairs for value in chain(*sides))


def _limits(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """The lowest and the highest reward: those of a rubric are within 0 and 1, those of the user's agent need not
    be."""
    known = [each.reward for each in rollouts if each.reward is not None]
    return min((0.0, *known)), max((1.0, *known))


def _scores(rollouts: Sequence[Rollout], samples: int, *, at_bound: bool = False) -> list[float | None]:
    """The reward of each answer, or the score of its miss or failure."""
    worst, best = _limits(rollouts)
    found: list[float | None] = [None] * len(rollouts)
    for side, places in zip(get_args(Side), _places(len(rollouts), samples), strict=True):
        own = [rollouts[place] for place in places]
        rewards = [each.reward for each in own]
        missed = [not each.completion.needs_reward for each in own]
        scores = gate_rewards(rewards, missed, side, at_bound=at_bound, worst=worst, best=best)
        for place, score in zip(places, scores, strict=True):
            found[place] = score
    return found


def _places(count: int, samples: int) -> list[list[int]]:
    """The numbers of the candidate's answers, and of those of the deployed adapter."""
    return [[place for place in range(count) if place // samples % 2 == side] for side in range(2)]


def _paired(values: Sequence[Value], samples: int) -> list[tuple[tuple[Value, ...], tuple[Value, ...]]]:
    """The results of both adapters, prompt by prompt."""
    sides = [tuple(values[start : start + samples]) for start in range(0, len(values), samples)]
    return list(zip(sides[::2], sides[1::2], strict=True))


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
