"""The check `json-schema`: the answer is JSON that a schema allows."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from flywheel.errors import CheckError, CostlyCheckError
from flywheel.judge.rubric.rubric import Criterion, Rubric
from flywheel.records.tool_calls import parse_json
from flywheel.records.verdict import Exchange
from flywheel.system.json_schema import problems
from flywheel.system.limited_call import CostlyCallError, FunctionError

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
    schema: Any = criterion.value
    if criterion.file:
        schema = json.loads(rubric.files[criterion.file].text) if rubric is not None else {}
    attempted = f"decide criterion {criterion.id}"
    try:
        # The rubric's schema is used for every task, whatever an answer makes of it.
        [problem] = problems(schema, [value], remember=False)
    except CostlyCallError as error:
        raise CostlyCheckError(attempted, f"its schema {error}", "Simplify the schema, or drop the task.") from None
    except FunctionError as error:
        why = f"its schema cannot be used: {error}"
        raise CheckError(attempted, why, "Keep every $ref inside the schema: nothing is fetched.") from None
    return not problem, problem or "the answer is JSON that the schema allows"
