"""Rubric files: YAML read into a rubric, or every problem and likely mistake with its position."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import yaml
from pydantic import ValidationError

from flywheel.config.sage import RUBRIC, rubrics_in
from flywheel.errors import CheckError, ConfigError
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.checks.python_check import Python, load
from flywheel.judge.rubric.criterion import Criterion, Example, UsedFile
from flywheel.judge.rubric.rubric import CRITERION, FLAT_ID, MAX_CRITERIA, MODEL_TYPE, SAME_ID, Rubric
from flywheel.records.ground_truth import KEY as GROUND_TRUTH
from flywheel.records.verdict import CriterionResult, Exchange
from flywheel.system.files import MAX_GIVEN_DATA_BYTES, expanded, read_given
from flywheel.system.python_files import imported_modules
from flywheel.system.yaml_file import START, Position, YamlDocument, explain, explain_one, path_of, read_yaml

REMEDY: Final = "Correct the file; see `flywheel docs rubrics-and-filters`."
_MAX_REPORTED: Final = 200
"""Problems that are reported; each is looked for in all of the file."""
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


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """A problem of a rubric file, and its position."""

    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.line}:{self.column}: {self.message}"


@dataclass(frozen=True, slots=True)
class RubricFile:
    """A rubric file: the rubric, or its problems."""

    rubric: Rubric | None
    problems: tuple[Problem, ...]
    document: YamlDocument | None = None
    """None if the file could not be read."""
    criteria: tuple[tuple[int, Criterion], ...] = ()
    """The criteria that are valid by themselves, with their index."""


def load_rubric(path: Path, if_missing: str = "Set filter.rubric to a rubric in YAML.") -> Rubric:
    """Read a rubric, or SAGE's configuration with rewards. Raises ConfigError; `if_missing` is its remedy if there is
    no such file."""
    document = read_yaml(path, f"read rubric {path}", if_missing)
    if (made := rubrics_in(document.value).get(RUBRIC)) is not None:
        return parse_rubric(made, str(path))
    read = validate(document, path.parent)
    if read.rubric is None:
        raise ConfigError(f"use rubric {path}", "; ".join(map(str, read.problems)), REMEDY)
    return read.rubric


def parse_rubric(raw: Any, name: str) -> Rubric:
    """Validate a parsed rubric; it brings the files that it uses. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(f"use rubric {name}", f"its root is a {type(raw).__name__}, not a mapping", REMEDY)
    try:
        return Rubric.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"use rubric {name}", explain(error, Rubric), REMEDY) from None


def read_rubric(path: Path) -> RubricFile:
    """Read a rubric; problems are returned and not raised."""
    try:
        document = read_yaml(path, f"read {path}", "Name a rubric in YAML.")
    except ConfigError as error:
        cause = error.__cause__
        mark = cause.problem_mark if isinstance(cause, yaml.MarkedYAMLError) else None
        position = Position(mark.line + 1, mark.column + 1) if mark else START
        return RubricFile(None, (Problem(*position, f"cannot be read: {error.why}"),))
    return validate(document, path.parent)


def validate(document: YamlDocument, folder: Path) -> RubricFile:
    """Validate a rubric. The files that it uses are relative to `folder`."""
    raw = document.value
    if not isinstance(raw, dict):
        kind = "empty" if raw is None else f"a {type(raw).__name__}, not a mapping"
        return RubricFile(None, (Problem(*START, f"its root is {kind}"),), document)
    problems = [
        Problem(*second, f"key `{path[-1]}` is written twice: the first time at {first.line}:{first.column}")
        for path, second, first in document.duplicates
    ]
    if "files" in raw:
        problems.append(Problem(*document.position(["files"], key=True), "unknown key `files`"))
        raw = {key: value for key, value in raw.items() if key != "files"}
    rubric = None
    criteria: tuple[tuple[int, Criterion], ...]
    try:
        rubric = Rubric.model_validate(raw)
        criteria = tuple(enumerate(rubric.criteria))
    except ValidationError as error:
        problems += [*_same_ids(raw, document), *_validation_problems(raw, error, document)]
        criteria = tuple(_valid_criteria(raw))
    files: dict[str, UsedFile] = {}
    if with_files := [(index, criterion) for index, criterion in criteria if criterion.file]:
        files, file_problems = _read_files(with_files, document, folder)
        problems += file_problems
    if problems:
        rubric = None
    elif rubric is not None and files:
        rubric = rubric.model_copy(update={"files": files})
    return RubricFile(rubric, tuple(sorted(set(problems))), document, criteria)


def _valid_criteria(raw: Mapping[str, Any]) -> Iterator[tuple[int, Criterion]]:
    """The criteria of a parsed file that are valid by themselves, with their index."""
    criteria = raw.get("criteria")
    for index, criterion in enumerate(criteria[:MAX_CRITERIA] if isinstance(criteria, list) else []):
        with suppress(ValidationError):
            yield index, CRITERION.validate_python(criterion)


def _same_ids(raw: dict[str, Any], document: YamlDocument) -> Iterator[Problem]:
    criteria = raw.get("criteria")
    first: dict[str, int] = {}
    for index, criterion in enumerate(criteria[:MAX_CRITERIA] if isinstance(criteria, list) else []):
        name = criterion.get("id") if isinstance(criterion, dict) else None
        if isinstance(name, str) and (earlier := first.setdefault(name, index)) != index:
            where = document.position(["criteria", earlier, "id"])
            message = f"{SAME_ID}: {name}, the first time at {where.line}:{where.column}"
            yield Problem(*document.position(["criteria", index, "id"]), message)


def _validation_problems(raw: dict[str, Any], error: ValidationError, document: YamlDocument) -> Iterator[Problem]:
    found = error.errors(include_url=False)
    if all(item["type"] == "extra_forbidden" for item in found):
        # They alone would hide what is wrong with the whole.
        try:
            Rubric.model_validate(raw, extra="ignore")
        except ValidationError as whole:
            found += whole.errors(include_url=False)
    for item in map(dict[str, Any], found[:_MAX_REPORTED]):
        message, context = explain_one(item, Rubric), item.get("ctx", {})
        if SAME_ID in message:
            continue  # `_same_ids` finds them beside other problems as well
        path = path_of(item, Rubric)
        path = (*path[:-1], *context["at"]) if context.get("at") else path
        if context.get("pos") is not None:
            yield Problem(*document.position_in_text(path, context["pos"]), message)
        else:
            yield Problem(*document.position(path, key=item["type"] == "extra_forbidden"), message)


def _read_files(
    criteria: Iterable[tuple[int, Criterion]], document: YamlDocument, folder: Path
) -> tuple[dict[str, UsedFile], list[Problem]]:
    """Read the files that criteria name, and try to use them."""
    files: dict[str, UsedFile] = {}
    uses: defaultdict[str, dict[str, str]] = defaultdict(dict)
    problems = []
    for index, criterion in criteria:
        name = criterion.file
        try:
            path = folder / expanded(Path(name))
            text = read_given(path).decode()
            listed = (criterion.files if isinstance(criterion, Python) else None) or ()
            used = {each: folder / expanded(Path(each)) for each in listed}
            if isinstance(criterion, Python):
                used |= imported_modules(path, folder)
            uses[name] |= {
                each: hashlib.sha256(read_given(used[each], MAX_GIVEN_DATA_BYTES)).hexdigest() for each in used
            }
            files[name] = UsedFile(path=str(path.absolute()), text=text, uses=tuple(sorted(uses[name].items())))
            if isinstance(criterion, Python):
                load(files[name], criterion.function)
            else:
                jsonschema_rs.meta.validate(json.loads(files[name].text))
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, ConfigError) as error:
            why = error.why if isinstance(error, ConfigError) else str(error).partition("\n")[0]
            message = f"`criteria.{index}`: {criterion.value} cannot be used: {why}"
            problems.append(Problem(*document.position(["criteria", index, "value"]), message))
    return files, problems


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
    line = {"metadata": {"reference": example.reference, GROUND_TRUTH: example.ground_truth}}
    exchange = Exchange(example.query, example.answer, trajectory=tuple(example.trajectory or ()), line=line)
    undecided = [entry for entry in rubric.every if not entry.is_decided(example)]
    results = [(entry, check(entry, exchange, rubric)) for entry in rubric.every if entry not in undecided]
    if failed := [result for criterion, result in results if criterion.required and not result.passed]:
        return _reasons(failed) if example.verdict == "accept" else ""
    checked_values = {result.criterion: result.value for _, result in results}
    if example.verdict == "accept":
        best = rubric.score(checked_values | {entry.id: _extreme(entry, best=True) for entry in undecided})
        if best < rubric.threshold:
            failed = [result for _, result in results if not result.passed]
            return f"at best its score is {best:.2f}, below {rubric.threshold:g}: {_reasons(failed)}"
    elif not any(criterion.required for criterion in undecided):
        lowest = rubric.score(checked_values | {entry.id: _extreme(entry, best=False) for entry in undecided})
        if lowest >= rubric.threshold:
            return f"the checks accept it: its score is {'at least ' if undecided else ''}{lowest:.2f}"
    return ""


def _extreme(criterion: Criterion, *, best: bool) -> float:
    values = criterion.scale.values()
    return max(values) if best is (criterion.weight > 0) else min(values)


def _reasons(failed: list[CriterionResult]) -> str:
    return "; ".join(f"{result.criterion} says: {result.reason}" for result in failed)


def likely_mistakes(file: RubricFile) -> list[Problem]:
    """The warnings about a rubric file, in the order of their positions."""
    if file.document is None or not isinstance(raw := file.document.value, dict):
        return []
    mistakes = [
        Problem(*file.document.position(["criteria", index, "value"]), f"`criteria.{index}`: its value {warning}")
        for index, criterion in file.criteria
        for warning in _warnings(criterion.type, criterion.value)
    ]
    mistakes += [
        Problem(*file.document.position([FLAT_ID]), f"`{FLAT_ID}` {warning}")
        for warning in _warnings(MODEL_TYPE, raw.get(FLAT_ID))
    ]
    return sorted(mistakes)


def _warnings(type_: str, value: Any) -> Iterator[str]:
    for is_pattern, text in _texts(value, type_ in ("regex", "not-regex")):
        for character in dict.fromkeys(_CONTROL_CHARACTER.findall(text)):
            letter = _ESCAPES[character]
            yield (
                f"holds the control character U+{ord(character):04X}, which texts hardly have: in double quotes YAML"
                f' reads "\\{letter}" as it. Use single quotes, or write \\\\{letter}'
            )
        for latex in _LATEX_COMMAND.finditer(text) if is_pattern else ():
            command = latex["command"]
            yield (
                f"can hardly match: in a regular expression {command[:2]} has a meaning of its own, and {command[2:]}"
                f" follows it. Write \\{command} for the LaTeX command"
            )


def _texts(value: Any, is_pattern: bool) -> Iterator[tuple[bool, str]]:
    """The texts in a value, and whether each is a pattern; in a JSON Schema, the values of `pattern` are."""
    if isinstance(value, str):
        yield is_pattern, value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, is_pattern)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _texts(part, key == "pattern")
