"""Whether a rubric's own examples can get their verdicts, as far as the checks decide that without the judge."""

from __future__ import annotations

from flywheel.errors import CheckError
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.criterion import KINDS, Criterion
from flywheel.judge.rubric.file import Problem, RubricFile
from flywheel.judge.rubric.rubric import Example, Rubric
from flywheel.records.verdict import CriterionResult, Exchange


def contradictions(file: RubricFile) -> list[Problem]:
    """Examples that cannot get their verdict whatever the judge says, and those for which a check raises."""
    if file.rubric is None or file.document is None:
        return []
    problems = []
    for index, example in enumerate(file.rubric.examples):
        try:
            why = _contradiction(file.rubric, example)
        except CheckError as error:
            why = str(error)
        if why:
            message = f"`examples.{index}` should be {example.verdict}ed, but {why}"
            problems.append(Problem(*file.document.position(["examples", index]), message))
    return problems


def _contradiction(rubric: Rubric, example: Example) -> str:
    line = {"metadata": {"reference": example.reference}} if example.reference else {}
    exchange = Exchange(example.query, example.answer, trajectory=tuple(example.trajectory or ()), line=line)
    undecided = [each for each in rubric.every if each.asks_the_judge or _is_undecided(each, example)]
    results = [(each, check(each, exchange, rubric)) for each in rubric.every if each not in undecided]
    if failed := [result for criterion, result in results if criterion.required and not result.passed]:
        return _reasons(failed) if example.verdict == "accept" else ""
    known = {result.criterion: result.value for _, result in results}
    if example.verdict == "accept":
        best = rubric.score(known | {each.id: _extreme(each, best=True) for each in undecided})
        if best < rubric.threshold:
            failed = [result for _, result in results if not result.passed]
            return f"at best its score is {best:.2f}, below {rubric.threshold:g}: {_reasons(failed)}"
    elif not any(criterion.required for criterion in undecided):
        lowest = rubric.score(known | {each.id: _extreme(each, best=False) for each in undecided})
        if lowest >= rubric.threshold:
            return f"the checks accept it: its score is {'at least ' if undecided else ''}{lowest:.2f}"
    return ""


def _is_undecided(criterion: Criterion, example: Example) -> bool:
    """Whether the example lacks what a check needs."""
    if KINDS[criterion.type].checks_steps:
        return example.trajectory is None
    return criterion.type == "math-equal" and not (criterion.right_answer or example.reference)


def _extreme(criterion: Criterion, *, best: bool) -> float:
    values = criterion.scale.values()
    return max(values) if best is (criterion.weight > 0) else min(values)


def _reasons(failed: list[CriterionResult]) -> str:
    return "; ".join(f"{result.criterion} says: {result.reason}" for result in failed)
