"""Rubric files: YAML in, a checked rubric out, or every problem with the place where it is."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from jsonschema import SchemaError
from jsonschema.validators import validator_for
from pydantic import ValidationError

from flywheel.errors import ConfigError
from flywheel.files import expanded
from flywheel.rubric import FLAT_ID, Criterion, Rubric, UsedFile
from flywheel.rubric.checks.python_function import load
from flywheel.rubric.criterion import MODEL_TYPE
from flywheel.rubric.lint import doubts
from flywheel.yaml_file import START, Place, Places, explain, explain_one, read_yaml

REMEDY: Final = "Correct the file; see `flywheel docs rubrics`."
_PASSES: Final = 50
"""How often a file is looked at again without what was wrong so far."""
_RIGHT_EXAMPLE: Final = {"query": "mended", "answer": "mended", "verdict": "accept"}


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong, and where it is."""

    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.line}:{self.column}: {self.message}"


@dataclass(frozen=True, slots=True)
class RubricText:
    """A rubric file with the places of its keys; `rubric` is None when `problems` say why. `warnings` are what can be
    meant, but hardly is."""

    rubric: Rubric | None
    problems: tuple[Problem, ...]
    places: Places | None = None
    warnings: tuple[Problem, ...] = ()


def load_rubric(path: Path, if_missing: str = "Set filter.rubric to a rubric in YAML.") -> Rubric:
    """Read a rubric. Raises ConfigError for whatever is wrong with it; `if_missing` is the remedy for no file."""
    raw = read_yaml(path, f"read rubric {path}", if_missing)
    text = path.read_text(encoding="utf-8")
    read = examine(raw, Places(text), path.parent)
    if read.rubric is None:
        raise ConfigError(f"use rubric {path}", "; ".join(map(str, read.problems)), REMEDY)
    return read.rubric


def parse_rubric(raw: Any, name: str) -> Rubric:
    """Check a parsed rubric. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(f"use rubric {name}", f"its root is a {type(raw).__name__}, not a mapping", REMEDY)
    try:
        return Rubric.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"use rubric {name}", explain(error, Rubric), REMEDY) from None


def read_rubric(path: Path) -> RubricText:
    """As `load_rubric`, but what is wrong is not raised."""
    try:
        raw = read_yaml(path, f"read {path}", "Name a rubric in YAML.")
        places = Places(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        place = _place_of(error.__cause__)
        return RubricText(None, (Problem(*place, f"cannot be read: {error.why}"),))
    return examine(raw, places, path.parent)


def _place_of(cause: BaseException | None) -> Place:
    mark = cause.problem_mark if isinstance(cause, yaml.MarkedYAMLError) else None
    return Place(mark.line + 1, mark.column + 1) if mark else START


def examine(raw: Any, places: Places, folder: Path) -> RubricText:
    """Everything that is wrong with a parsed file; files that it names are relative to `folder`."""
    if not isinstance(raw, dict):
        kind = "empty" if raw is None else f"a {type(raw).__name__}, not a mapping"
        return RubricText(None, (Problem(*START, f"its root is {kind}"),), places)
    problems = [
        Problem(*again, f"key `{path[-1]}` is written twice: the first time at {first.line}:{first.column}")
        for path, again, first in places.duplicates()
    ]
    if "files" in raw:
        problems.append(Problem(*places.of(["files"], key=True), "unknown key `files`"))
        raw = {key: value for key, value in raw.items() if key != "files"}
    sound = dict(_sound_criteria(raw))
    files, of_files = _used_files(sound, places, folder)
    problems += [*_same_ids(raw, places), *_of_model(raw, places), *of_files]
    rubric = None
    if not problems:
        rubric = Rubric.model_validate(raw)
        rubric = rubric.model_copy(update={"files": files}) if files else rubric
    warnings = [
        Problem(*places.of(["criteria", place, "value"]), f"`criteria.{place}`: its value {doubt}")
        for place, criterion in sound.items()
        for doubt in doubts(criterion.type, criterion.value)
    ]
    warnings += [
        Problem(*places.of([FLAT_ID]), f"`{FLAT_ID}` {doubt}") for doubt in doubts(MODEL_TYPE, raw.get(FLAT_ID))
    ]
    return RubricText(rubric, tuple(sorted(set(problems))), places, tuple(sorted(warnings)))


def _sound_criteria(raw: Mapping[str, Any]) -> Iterator[tuple[int, Criterion]]:
    """The criteria that are right by themselves, by their places."""
    criteria = raw.get("criteria")
    for place, criterion in enumerate(criteria if isinstance(criteria, list) else []):
        with suppress(ValidationError):
            yield place, Criterion.model_validate(criterion)


def _of_model(raw: dict[str, Any], places: Places) -> list[Problem]:
    """What the model says, pass after pass: what is wrong is replaced, so that it cannot hide the rest."""
    problems: list[Problem] = []
    left = copy.deepcopy(raw)
    for _ in range(_PASSES):
        try:
            Rubric.model_validate(left)
            break
        except ValidationError as error:
            found = error.errors(include_url=False)
        whole = all(problem.message.startswith("unknown key") for problem in problems)
        # Without the criteria that are wrong themselves, the sums of the others say nothing.
        told = (_problem(dict(line), places) for line in found if line["loc"] or whole)
        problems += [problem for problem in told if "have the same id" not in problem.message]
        if not [line for line in found if line["loc"]]:
            break
        for line in found:
            _mend(left, line["loc"], unknown=line["type"] == "extra_forbidden")
    return problems


def _same_ids(raw: dict[str, Any], places: Places) -> Iterator[Problem]:
    criteria = raw.get("criteria")
    first: dict[str, int] = {}
    for place, criterion in enumerate(criteria if isinstance(criteria, list) else []):
        name = criterion.get("id") if isinstance(criterion, dict) else None
        if isinstance(name, str) and (before := first.setdefault(name, place)) != place:
            at = places.of(["criteria", place, "id"])
            where = places.of(["criteria", before, "id"])
            yield Problem(*at, f"criteria have the same id: {name}, the first time at {where.line}:{where.column}")


def _problem(line: dict[str, Any], places: Places) -> Problem:
    context = line.get("ctx", {})
    at = (*line["loc"], *context.get("at", ()))
    message = explain_one(line, Rubric)
    if line["type"] == "literal_error" and isinstance(line["input"], str):
        known = re.findall(r"'([^']+)'", context["expected"])
        if close := difflib.get_close_matches(line["input"], known, n=1):
            message = f"`{'.'.join(map(str, at))}`: there is no {line['input']!r} (did you mean {close[0]!r}?)"
    if context.get("pos") is not None:
        return Problem(*places.in_scalar(at, context["pos"]), message)
    return Problem(*places.of(at, key=line["type"] == "extra_forbidden"), message)


def _mend(raw: dict[str, Any], location: tuple[int | str, ...], *, unknown: bool) -> None:
    """Take out an unknown key; put something right in the place of anything else."""
    match location:
        case (key,) if unknown or key != "id":
            raw.pop(str(key), None)
        case (key,):
            raw[str(key)] = "mended"
        case ("criteria" | "examples" as key, int(place), *rest) if unknown and rest:
            part = raw[key][place]
            for name in rest[:-1]:
                part = part[name]
            part.pop(rest[-1], None)
        case ("criteria" | "examples" as key, int(place), *_):
            right: Mapping[str, str] = {"id": f"mended_{place}", "value": "mended"}
            raw[key][place] = dict(right if key == "criteria" else _RIGHT_EXAMPLE)
        case (key, name) if unknown:
            raw[str(key)].pop(name, None)
        case (key, *_):
            raw.pop(str(key), None)


def _used_files(
    criteria: Mapping[int, Criterion], places: Places, folder: Path
) -> tuple[dict[str, UsedFile], list[Problem]]:
    """The files that criteria name, read and tried."""
    files: dict[str, UsedFile] = {}
    problems = []
    for place, criterion in criteria.items():
        if not (name := criterion.file):
            continue
        try:
            path = folder / expanded(Path(name))
            files[name] = UsedFile(path=str(path.absolute()), text=path.read_text(encoding="utf-8"))
            if criterion.type == "python":
                load(files[name], str(criterion.value).rpartition(":")[2])
            else:
                schema = json.loads(files[name].text)
                validator_for(schema).check_schema(schema)
        except (OSError, ValueError, TypeError, AttributeError, SchemaError, ConfigError) as error:
            why = error.why if isinstance(error, ConfigError) else str(error).partition("\n")[0]
            at = places.of(["criteria", place, "value"])
            problems.append(Problem(*at, f"`criteria.{place}`: {criterion.value} cannot be used: {why}"))
    return files, problems
