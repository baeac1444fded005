"""Whether a rubric's own examples agree with its checks, as far as that can be told without the judge."""

from __future__ import annotations

import json

from flywheel.errors import CheckError
from flywheel.rubric import KINDS, Criterion, Example, Rubric
from flywheel.rubric.checks import check
from flywheel.rubric.file import Problem
from flywheel.verdict import CriterionResult, Exchange
from flywheel.yaml_file import Places


def contradictions(rubric: Rubric, places: Places) -> list[Problem]:
    """Examples that come out against their verdict whatever the judge says, and those that a check breaks on."""
    problems = []
    for place, example in enumerate(rubric.examples):
        try:
            why = _contradiction(rubric, example)
        except CheckError as error:
            why = str(error)
        if why:
            at = places.of(["examples", place])
            problems.append(Problem(*at, f"`examples.{place}` should be {example.verdict}ed, but {why}"))
    return problems


def _contradiction(rubric: Rubric, example: Example) -> str:
    exchange = exchange_of(example)
    open_, results = [], []
    for criterion in rubric.every:
        if criterion.asks_the_judge or _cannot_be_told(criterion, example):
            open_.append(criterion)
        else:
            results.append((criterion, check(criterion, exchange, rubric)))
    if failed := [result for criterion, result in results if criterion.required and not result.passed]:
        return _told(failed) if example.verdict == "accept" else ""
    known = {result.criterion: result.value for _, result in results}
    best, worst = (known | {c.id: _extreme(c, best=best) for c in open_} for best in (True, False))
    if example.verdict == "accept" and rubric.score(best) < rubric.threshold:
        failed = [result for _, result in results if not result.passed]
        return f"at best its score is {rubric.score(best):.2f}, below {rubric.threshold:g}: {_told(failed)}"
    if example.verdict == "reject" and not any(criterion.required for criterion in open_):
        lowest = rubric.score(worst)
        if lowest >= rubric.threshold:
            return f"the checks accept it: its score is {'at least ' if open_ else ''}{lowest:.2f}"
    return ""


def exchange_of(example: Example) -> Exchange:
    metadata = {"reference": example.reference} if example.reference else {}
    return Exchange(
        example.query,
        example.answer,
        trajectory=tuple(example.trajectory or ()),
        line={
            "main_query": example.query,
            "question": example.query,
            "answer": example.answer,
            "init_messages": [],
            "metadata": {
                "answer": example.answer,
                "tools_json": "[]",
                "trajectory_json": json.dumps(example.trajectory or []),
                **metadata,
            },
        },
    )


def _cannot_be_told(criterion: Criterion, example: Example) -> bool:
    if KINDS[criterion.type].looks_at_steps:
        return example.trajectory is None
    return criterion.type == "math-equal" and not (criterion.right_answer or example.reference)


def _extreme(criterion: Criterion, *, best: bool) -> float:
    values = criterion.scale.values()
    return max(values) if best is (criterion.weight > 0) else min(values)


def _told(failed: list[CriterionResult]) -> str:
    return "; ".join(f"{result.criterion} says: {result.reason}" for result in failed)
