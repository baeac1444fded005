"""The check `json-schema`: the answer is JSON that a schema allows."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from flywheel.errors import CheckError
from flywheel.rubric.criterion import Criterion
from flywheel.rubric.pattern import search
from flywheel.rubric.rubric import Rubric
from flywheel.tool_calls import parse_json
from flywheel.verdict import Exchange

MAX_JSON_CHARACTERS: Final = 200_000
_FENCED: Final = re.compile(r"\A\s*+(`{3,}+|~{3,}+)[^\n`]*+\n(?P<inside>.*)^[ \t]*+\1\s*\Z", re.DOTALL | re.MULTILINE)


def check_json_schema(criterion: Criterion, exchange: Exchange, rubric: Rubric | None) -> tuple[bool, str]:
    text = exchange.answer
    if len(text) > MAX_JSON_CHARACTERS:
        return False, f"the answer has {len(text)} characters; JSON of more than {MAX_JSON_CHARACTERS} is not read"
    if (fenced := _FENCED.fullmatch(text)) is not None:
        text = fenced["inside"]
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        return False, f"the answer is not JSON: {error}"
    try:
        problem = next(_validator(criterion, rubric).iter_errors(value), None)
    except (Unresolvable, RecursionError) as error:
        raise CheckError(
            f"decide criterion {criterion.id}",
            f"its schema cannot be used: {error}",
            "Keep every $ref inside the schema: nothing is fetched.",
        ) from None
    if problem is None:
        return True, "the answer is JSON that the schema allows"
    return False, f"at {problem.json_path}: {problem.message}"[:300]


def _validator(criterion: Criterion, rubric: Rubric | None) -> Validator:
    schema: Any = criterion.value
    if criterion.file:
        schema = json.loads(rubric.files[criterion.file].text) if rubric is not None else {}
    return validator_of(schema)


def validator_of(schema: Any) -> Validator:
    """A validator whose patterns have a time limit and which fetches nothing."""
    with_timeout = extend(validator_for(schema, Draft202012Validator), {"pattern": _match_pattern})
    # The registry is empty: a reference to the network raises, and no request is sent.
    return with_timeout(schema, registry=Registry())


def _match_pattern(_validator: Validator, pattern: str, instance: Any, _schema: Any) -> Any:
    if isinstance(instance, str) and not search(pattern, [instance], regex.DOTALL):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")
