"""The check `json-schema`: the answer is JSON that a schema allows."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import WithJsonSchema

from flywheel.errors import CheckError, CostlyCheckError
from flywheel.judge.rubric.criterion import A_TEXT, Criterion, Files, checked
from flywheel.records.tool_calls import parse_json
from flywheel.records.verdict import Exchange
from flywheel.system.json_schema import problems
from flywheel.system.limited_call import CostlyCallError, FunctionError

MAX_JSON_CHARACTERS: Final = 200_000
_FENCED: Final = re.compile(r"\A\s*+(`{3,}+|~{3,}+)[^\n`]*+\n(?P<inside>.*)^[ \t]*+\1\s*\Z", re.DOTALL | re.MULTILINE)
_SCHEMA: Final = {"anyOf": [A_TEXT, {"$ref": "https://json-schema.org/draft/2020-12/schema"}]}


def _check_schema(value: Any) -> None:
    if isinstance(value, str) and value.strip():
        return
    if not isinstance(value, dict):
        raise ValueError("it must be a JSON Schema, or the name of a file that holds one")
    import jsonschema_rs

    try:
        jsonschema_rs.meta.validate(value)
    except jsonschema_rs.ValidationError as error:
        where = "".join(f".{part}" for part in error.instance_path)
        raise ValueError(f"it is no JSON Schema: at `value{where}`, {error.message}") from None


class JsonSchema(Criterion):
    """The answer is JSON that the schema allows."""

    type: Literal["json-schema"] = "json-schema"
    value: Annotated[str | dict[str, Any], checked(_check_schema), WithJsonSchema(_SCHEMA)]
    reads_whole_texts: ClassVar = True

    @property
    def file(self) -> str:
        return self.value if isinstance(self.value, str) else ""

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        text = exchange.answer
        if len(text) > MAX_JSON_CHARACTERS:
            return (
                False,
                f"the answer has {len(text)} characters; JSON of more than {MAX_JSON_CHARACTERS} is not read",
            )
        if (fenced := _FENCED.fullmatch(text)) is not None:
            text = fenced["inside"]
        try:
            value = parse_json(text)
        except (ValueError, RecursionError) as error:
            return False, f"the answer is not JSON: {error}"
        schema: Any = self.value
        if self.file:
            schema = json.loads(files[self.file].text) if self.file in files else {}
        attempted = f"decide criterion {self.id}"
        try:
            # The rubric's schema is used for every task, whatever an answer makes of it.
            [problem] = problems(schema, [value], remember=False)
        except CostlyCallError as error:
            raise CostlyCheckError(
                attempted, f"its schema {error}", "Simplify the schema, or drop the task."
            ) from None
        except FunctionError as error:
            why = f"its schema cannot be used: {error}"
            raise CheckError(attempted, why, "Keep every $ref inside the schema: nothing is fetched.") from None
        return not problem, problem or "the answer is JSON that the schema allows"
