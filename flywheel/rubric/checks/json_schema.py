"""Whether the answer is JSON that a schema allows."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from flywheel.errors import CheckError
from flywheel.rubric import Criterion, Rubric
from flywheel.rubric.checks.bound import MOST
from flywheel.rubric.checks.found import Found, found
from flywheel.rubric.checks.text import search
from flywheel.verdict import Exchange

FENCED: Final = re.compile(r"\A\s*+(`{3,}+|~{3,}+)[^\n`]*+\n(?P<inside>.*)^[ \t]*+\1\s*\Z", re.DOTALL | re.MULTILINE)


def fits_schema(criterion: Criterion, exchange: Exchange, rubric: Rubric | None) -> Found:
    text = exchange.answer
    if len(text) > MOST:
        return found(False, f"the answer has {len(text)} characters, and JSON of more than {MOST} is not read")
    if (fenced := FENCED.fullmatch(text)) is not None:
        text = fenced["inside"]
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return found(False, f"the answer is no JSON: {error}")
    try:
        problem = next(_validator(criterion, rubric).iter_errors(value), None)
    except (Unresolvable, RecursionError) as error:
        raise CheckError(
            f"decide criterion {criterion.id}",
            f"its schema cannot be used: {error}",
            "Keep every $ref inside the schema: nothing is fetched.",
        ) from None
    if problem is None:
        return found(True, "the answer is JSON that the schema allows")
    return found(False, f"at {problem.json_path}: {problem.message}"[:300])


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _validator(criterion: Criterion, rubric: Rubric | None) -> Validator:
    schema: Any = criterion.value
    if criterion.file:
        schema = json.loads(rubric.files[criterion.file].text) if rubric is not None else {}
    guarded = extend(validator_for(schema, Draft202012Validator), {"pattern": _pattern})
    # An empty registry: a reference to the network is an error and no request.
    return guarded(schema, registry=Registry())


def _pattern(_validator: Validator, pattern: str, instance: Any, _schema: Any) -> Any:
    if isinstance(instance, str) and not search(pattern, instance, "a json-schema criterion"):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")
