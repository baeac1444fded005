"""The graded answers of an evaluation, its metrics, and how those of two evaluations differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flywheel.errors import JudgeError, StoreError
from flywheel.judge.agent_metrics import SCORE, Attempt, measure, metric_of
from flywheel.judge.rubric.file import parse_rubric
from flywheel.records.ground_truth import ground_truth_of
from flywheel.records.program_run import ENGINE_FAULTS
from flywheel.records.round import ANSWERS_FILE, RESULT_FILE, RoundResult, RoundTask
from flywheel.records.verdict import Outcome
from flywheel.training.data.rollout_file import read_rollouts
from flywheel.training.data.round_directory import read_spec
from flywheel.training.gate.intervals import (
    CONFIDENCE,
    MetricSummary,
    MetricValue,
    Paired,
    compare_criterion,
    summarise,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A graded answer.

    Attributes:
        accepted: Whether the rubric accepts; None while that is undecided. A failed answer is rejected.
        values: Of each metric, 0…1; None where it was not measured.
        failed: Why there was nothing to grade; empty if there was.
        line: As in `answers.jsonl`.
    """

    task: RoundTask
    accepted: bool | None
    values: Mapping[str, float | None]
    failed: str
    line: Mapping[str, Any]

    @classmethod
    def of(cls, task: RoundTask, line: Mapping[str, Any], criteria: Collection[str]) -> Answer:
        """A failed answer counts 0, also by `criteria`: those of the rubric with a positive weight. One that lacks an
        answer of the engine, which failed, is undecided."""
        verdict = line["verdict"]
        # Without a verdict and a failure, only the reward of the user's agent counts.
        is_of_engine = (line.get("program") or {}).get("failure") in ENGINE_FAULTS
        failed = line["error"] if verdict is None and not is_of_engine else ""
        accepted: bool | None = False if failed else None
        if verdict is not None and verdict["outcome"] != Outcome.UNDECIDED:
            accepted = verdict["outcome"] == Outcome.ACCEPTED
        attempt = Attempt(line["steps"], line["answer"], accepted, failed=bool(failed), errors=task.errors)
        values: dict[str, float | None] = {SCORE: 0.0 if failed else line["reward"]}
        values |= measure(attempt, ground_truth_of(task.line or task.exchange.line))
        values |= dict.fromkeys(map(metric_of, criteria), 0.0) if failed else {}
        values |= {metric_of(each["criterion"]): each["value"] for each in line["criteria"]}
        return cls(task, accepted, values, failed, line)

    @property
    def is_cut_off(self) -> bool:
        """Whether a limit ended it before it had any text: a reasoning model may use up its tokens before."""
        return bool(self.line["truncated"]) and not self.failed and not self.line["answer"].strip()


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of an evaluation by task. `left_out` are tasks that could not be asked, with the reason."""

    by_task: Mapping[str, Sequence[Answer]]
    left_out: Mapping[str, str]
    result: RoundResult

    @property
    def every(self) -> list[Answer]:
        return [answer for own in self.by_task.values() for answer in own]

    def summary(self, metric: str, seed: int) -> MetricSummary:
        values = [
            MetricValue(name, answer.values.get(metric), answer.task.conversation)
            for name, own in self.by_task.items()
            for answer in own
        ]
        return summarise(values, confidence=CONFIDENCE, seed=seed)

    @property
    def judge_error(self) -> JudgeError | None:
        """That the judge has decided about no answer; None if it has, or was not asked."""
        if any(answer.accepted is not None and not answer.failed for answer in self.every):
            return None
        errors = Counter(answer.line["error"] for answer in self.every if answer.accepted is None)
        errors.pop("", None)
        if not errors:
            return None
        [(why, _)] = errors.most_common(1)
        return JudgeError("judge the answers", why, "Correct that; the same command asks the judge again.")


def answers_in(directory: Path) -> Answers:
    """Those in the directory of an evaluation that has ended. Raises TrainError and StoreError."""
    spec = read_spec(directory)
    criteria = {each.id for each in parse_rubric(spec.rubric, f"the rubric of {directory}").every if each.weight > 0}
    tasks = {task.task_id: task for task in spec.held_out}
    by_task = defaultdict[str, list[Answer]](list)
    for line in read_rollouts(directory / ANSWERS_FILE):
        by_task[line["task_id"]].append(Answer.of(tasks[line["task_id"]], line, criteria))
    path = directory / RESULT_FILE
    try:
        result = RoundResult.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StoreError(f"read {path}", "it is no result of an evaluation", "Evaluate again.") from error
    return Answers(dict(by_task), result.left_out, result)


def difference(metric: str, ours: Answers, theirs: Answers, seed: int) -> dict[str, Any]:
    """The paired difference of a metric over the tasks that both have measured, and its interval by conversation;
    null without such tasks."""
    pairs = []
    for name, own in ours.by_task.items():
        other = theirs.by_task.get(name, ())
        if count := min(len(own), len(other)):
            one, two = (tuple(each.values.get(metric) for each in some[:count]) for some in (own, other))
            pairs.append(Paired(name, one, two, own[0].task.conversation))
    found = compare_criterion(metric, pairs, takes_away=False, confidence=CONFIDENCE, seed=seed)
    figures = {"difference": found.gain, "lower": found.lower, "upper": found.upper}
    return {"tasks": found.tasks, **(figures if found.tasks else dict.fromkeys(figures))}


def flips(ours: Answers, theirs: Answers) -> list[tuple[Answer, Answer]]:
    """The answers of both to one task of which one is accepted and the other rejected."""
    pairs = (
        pair for name, own in ours.by_task.items() for pair in zip(own, theirs.by_task.get(name, ()), strict=False)
    )
    return [(one, other) for one, other in pairs if {one.accepted, other.accepted} == {True, False}]
