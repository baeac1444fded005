"""Warnings about a rubric: misleading backslashes, examples that cannot get their verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from flywheel.errors import CheckError
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.criterion import KINDS, MODEL_TYPE, Criterion
from flywheel.judge.rubric.file import Problem, RubricFile, valid_criteria
from flywheel.judge.rubric.rubric import FLAT_ID, Example, Rubric
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


_ESCAPES: Final = {
    "\0": "0", "\a": "a", "\b": "b", "\x1b": "e", "\f": "f", "\v": "v", "\x85": "N", "\u2028": "L", "\u2029": "P",
}  # fmt: skip
"""Characters that YAML reads for a backslash and a letter in double quotes; tabs and line ends may be intended."""
_CONTROL_CHARACTER: Final = re.compile(f"[{re.escape(''.join(_ESCAPES))}]")
_LATEX_COMMAND: Final = re.compile(
    r"(?<!\\)(?:\\\\)*(?P<command>\\(?:boxed|begin|beta|binom|bmod|bullet|fbox|frac|forall|dfrac|delta|dots|neq|nabla|right"
    r"|rightarrow|rangle|rho|sqrt|sigma|subset|text|textbf|textit|textrm|times|theta|vec|varphi|alpha|approx|angle|wedge"
    r"|Delta|Sigma))(?![A-Za-z])"
)
"""LaTeX commands whose backslash and first letter mean something else in a regular expression."""


def warnings(file: RubricFile) -> list[Problem]:
    """The warnings about a rubric file, in the order of their positions."""
    if file.document is None or not isinstance(raw := file.document.value, dict):
        return []
    found = [
        Problem(*file.document.position(["criteria", index, "value"]), f"`criteria.{index}`: its value {warning}")
        for index, criterion in valid_criteria(raw)
        for warning in _warnings(criterion.type, criterion.value)
    ]
    found += [
        Problem(*file.document.position([FLAT_ID]), f"`{FLAT_ID}` {warning}")
        for warning in _warnings(MODEL_TYPE, raw.get(FLAT_ID))
    ]
    return sorted(found)


def _warnings(type_: str, value: Any) -> Iterator[str]:
    for is_pattern, text in _texts(value, type_ in ("regex", "not-regex")):
        for character in dict.fromkeys(_CONTROL_CHARACTER.findall(text)):
            letter = _ESCAPES[character]
            yield (
                f"holds the control character U+{ord(character):04X}, which texts hardly have: in double quotes YAML"
                f' reads "\\{letter}" as it. Use single quotes, or write \\\\{letter}'
            )
        for found in _LATEX_COMMAND.finditer(text) if is_pattern else ():
            command = found["command"]
            yield (
                f"can hardly match: in a regular expression {command[:2]} has a meaning of its own, and {command[2:]}"
                f" follows it. Write \\{command} for the LaTeX command"
            )


def _texts(value: Any, is_pattern: bool) -> Iterator[tuple[bool, str]]:
    """The texts in a value, and whether each is a pattern; in a JSON Schema, the values of `pattern` are."""
    if isinstance(value, str):
        yield is_pattern, value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, is_pattern)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, key == "pattern")
