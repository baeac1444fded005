"""The graded answers of an evaluation, and how those of two evaluations differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from flywheel.daemon.judging.quality_bar import Case, CaseOutcome
from flywheel.errors import JudgeError, StoreError
from flywheel.judge.agent_metrics import SCORE, Attempt, measure, metric_of
from flywheel.judge.rubric.file import parse_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.ground_truth import ground_truth_of
from flywheel.records.program_run import ENGINE_FAULTS
from flywheel.records.round import ANSWERS_FILE, RESULT_FILE, RoundResult, RoundTask
from flywheel.system.terminal import excerpt
from flywheel.training.data.rollout_file import read_rollouts
from flywheel.training.data.round_directory import read_spec
from flywheel.training.gate.intervals import CONFIDENCE, Paired, compare_criterion

EXCERPT = 240
"""Characters of a question or an answer of a flip."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A graded answer.

    Attributes:
        case: Its outcome and its metrics. A failed answer is rejected.
        failed: Why there was nothing to grade; empty if there was.
        line: As in `answers.jsonl`.
    """

    task: RoundTask
    case: Case
    failed: str
    line: Mapping[str, Any]

    @classmethod
    def of(cls, task: RoundTask, line: Mapping[str, Any], rubric: Rubric) -> Self:
        """A failed answer counts 0, also by the criteria with a positive weight. One that lacks an answer of the
        engine, which failed, is undecided."""
        verdict, criteria = line["verdict"], line["criteria"]
        # Without a verdict and a failure, only the reward of the user's agent counts.
        is_of_engine = (line.get("program") or {}).get("failure") in ENGINE_FAULTS
        failed = line["error"] if verdict is None and not is_of_engine else ""
        outcome = CaseOutcome.REJECTED if failed else CaseOutcome.UNDECIDED
        outcome = outcome if verdict is None else CaseOutcome(verdict["outcome"])
        attempt = Attempt(
            line["steps"], line["answer"], _ACCEPTS.get(outcome), failed=bool(failed), errors=task.errors
        )
        score = 0.0 if failed else line["reward"]
        values = {SCORE: score, **measure(attempt, ground_truth_of(task.line or task.exchange.line))}
        if failed:
            values |= {metric_of(each.id): 0.0 for each in rubric.every if each.weight > 0}
        values |= {metric_of(each["criterion"]): each["value"] for each in criteria}
        missed = (
            f"{each['criterion']}: {each['choice']}" + (f" ({each['reason']})" if each["reason"] else "")
            for each in criteria
            if not each["passed"]
        )
        why = f"no answer: {failed}" if failed else line["error"]
        why = why or ("cut off without text" if _is_cut_off(line) else "")
        case = Case(rubric.id, task.task_id, outcome, score, tuple(missed), why, task.conversation, values)
        return cls(task, case, failed, line)

    @property
    def accepted(self) -> bool | None:
        """None while it is undecided."""
        return _ACCEPTS.get(self.case.outcome)

    @property
    def is_cut_off(self) -> bool:
        """Whether a limit ended it before it had any text: a reasoning model may use up its tokens before."""
        return not self.failed and _is_cut_off(self.line)

    def shown(self) -> dict[str, Any]:
        """One of the two answers of a flip."""
        return {
            "accepted": self.accepted,
            "score": self.case.score,
            "answer": excerpt(self.line["answer"], EXCERPT),
            "failed": [each["criterion"] for each in self.line["criteria"] if not each["passed"]],
            "error": self.line["error"],
        }


_ACCEPTS = {CaseOutcome.ACCEPTED: True, CaseOutcome.REJECTED: False}


def _is_cut_off(line: Mapping[str, Any]) -> bool:
    return bool(line["truncated"]) and not line["answer"].strip()


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of an evaluation by task. `left_out` are tasks that could not be asked, with the reason."""

    by_task: Mapping[str, Sequence[Answer]]
    left_out: Mapping[str, str]
    result: RoundResult

    @property
    def every(self) -> list[Answer]:
        return [answer for own in self.by_task.values() for answer in own]

    @property
    def cases(self) -> list[Case]:
        return [answer.case for answer in self.every]

    @property
    def cut_off(self) -> list[Answer]:
        return [answer for answer in self.every if answer.is_cut_off]

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.every if answer.failed]

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
    rubric = parse_rubric(spec.rubric, f"the rubric of {directory}")
    tasks = {task.task_id: task for task in spec.held_out}
    by_task = defaultdict[str, list[Answer]](list)
    for line in read_rollouts(directory / ANSWERS_FILE):
        by_task[line["task_id"]].append(Answer.of(tasks[line["task_id"]], line, rubric))
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
            one, two = (tuple(each.case.values.get(metric) for each in some[:count]) for some in (own, other))
            pairs.append(Paired(name, one, two, own[0].task.conversation))
    found = compare_criterion(metric, pairs, takes_away=False, confidence=CONFIDENCE, seed=seed)
    figures = {"difference": found.gain, "lower": found.lower, "upper": found.upper}
    return {"tasks": found.tasks, **(figures if found.tasks else dict.fromkeys(figures))}


def flips(ours: Answers, theirs: Answers) -> list[dict[str, Any]]:
    """The answers of both to one task of which one is accepted and the other rejected."""
    pairs = (
        pair for name, own in ours.by_task.items() for pair in zip(own, theirs.by_task.get(name, ()), strict=False)
    )
    return [
        {
            "task_id": one.task.task_id,
            "query": excerpt(one.task.exchange.query, EXCERPT),
            "ours": one.shown(),
            "theirs": other.shown(),
        }
        for one, other in pairs
        if {one.accepted, other.accepted} == {True, False}
    ]
