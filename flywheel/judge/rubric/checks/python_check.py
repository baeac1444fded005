"""The check `python`: a function of the user's gets the task line and returns how far the criterion is met."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import orjson
from pydantic import Field, WithJsonSchema, field_validator

from flywheel.errors import CheckError, ConfigError
from flywheel.judge.rubric.checks.tool_calls import calls_of
from flywheel.judge.rubric.criterion import Criterion, Files, UsedFile, checked, invalid
from flywheel.records.verdict import Exchange
from flywheel.system.limited_call import FunctionError
from flywheel.system.user_code import PythonProcess, function_of

TIMEOUT_SECONDS: Final = 30.0
"""Longest call of a function for one task."""
MAX_PROCESSES: Final = 8
"""Processes per function: calls that wait for something outside run side by side."""
_FUNCTION: Final = {"type": "string", "pattern": r"^.*\S.*:\w+$"}


def _check_function(value: Any) -> None:
    path, _, name = str(value).rpartition(":")
    if not isinstance(value, str) or not path.strip() or not name.isidentifier():
        raise ValueError("it must be `path:function`, such as `checks.py:is_polite`")


class Python(Criterion):
    """A function of your own decides."""

    type: Literal["python"] = "python"
    value: Annotated[str, checked(_check_function), WithJsonSchema(_FUNCTION)]
    files: list[str] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Files that the function reads, relative to the rubric: another content makes another rubric."""
    reads_whole_texts: ClassVar = True

    @field_validator("files")
    @classmethod
    def _lists_files(cls, files: list[str] | None) -> list[str] | None:
        if files is not None and not all(name.strip() for name in files or [""]):
            raise invalid("it lists no file")
        return files

    @property
    def file(self) -> str:
        return self.value.rpartition(":")[0]

    @property
    def function(self) -> str:
        return self.value.rpartition(":")[2]

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        attempted = f"decide criterion {self.id} by {self.value}"
        if self.file not in files:
            raise CheckError(attempted, "its file was not read", "Read the rubric from a file.")
        try:
            returned = load(files[self.file], self.function)(task_line(exchange))
            value = returned.value
            if value is None or math.isnan(value) or not 0 <= value <= 1:
                raise FunctionError(
                    f"{self.function} must return a bool, a number in 0…1, or one of them and a reason, not"
                    f" {returned.shown}"
                )
        except ConfigError as error:
            raise CheckError(attempted, error.why, error.hint) from error
        except FunctionError as error:
            raise CheckError(
                attempted, str(error), "Correct the function; the task is judged again later."
            ) from error
        return value, f"{self.function} returned {returned.shown}" if returned.reason is None else returned.reason


@lru_cache(maxsize=16)
def load(used: UsedFile, name: str) -> PythonProcess:
    """The function of a file that a rubric uses, in processes of its own. Raises ConfigError."""
    attempted = f"load {used.path}:{name}"
    return function_of(
        used.text,
        Path(used.path),
        name,
        attempted=attempted,
        seconds=TIMEOUT_SECONDS,
        most=MAX_PROCESSES,
        uses=used.uses,
    )


def task_line(exchange: Exchange) -> Mapping[str, Any]:
    """The task line; where it is not whole, as for a rollout, what is known of it under the same keys."""
    if "answer" in exchange.line:
        return exchange.line
    errors = [f"tool {call.name}: {call.result}" for call in calls_of(exchange) if call.failed]
    return {
        "main_query": exchange.query,
        "question": exchange.query,
        "answer": exchange.answer,
        "init_messages": list(exchange.history),
        **exchange.line,
        "metadata": {
            "answer": exchange.answer,
            "reference": exchange.reference,
            "tools_json": orjson.dumps(exchange.tools).decode(),
            "trajectory_json": orjson.dumps(exchange.trajectory).decode(),
            "errors_json": orjson.dumps(errors).decode(),
            **exchange.line.get("metadata", {}),
        },
    }
