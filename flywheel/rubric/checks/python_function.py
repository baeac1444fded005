"""A function of the user's own: it is given the task's line and says how far the criterion holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import orjson

from flywheel.errors import CheckError, ConfigError
from flywheel.rubric import Criterion, Rubric, UsedFile
from flywheel.rubric.checks.found import Found
from flywheel.user_code import FunctionError, PythonProcess, Said, function_of
from flywheel.verdict import Exchange

SECONDS: Final = 30.0
"""What a function may take on one task."""
MOST: Final = 8
"""Processes of one function: those that wait for something else need not wait for each other."""


def says_yes(criterion: Criterion, exchange: Exchange, rubric: Rubric | None) -> Found:
    name = str(criterion.value).rpartition(":")[2]
    attempted = f"decide criterion {criterion.id} by {criterion.value}"
    if rubric is None or criterion.file not in rubric.files:
        raise CheckError(attempted, "its file was not read", "Read the rubric from a file.")
    try:
        return _read(load(rubric.files[criterion.file], name)(line_of(exchange)), name)
    except ConfigError as error:
        raise CheckError(attempted, error.why, error.hint) from error
    except FunctionError as error:
        raise CheckError(attempted, str(error), "Correct the function; the task is judged again later.") from error


@lru_cache(maxsize=16)
def load(used: UsedFile, name: str) -> PythonProcess:
    """The function of a file that a rubric uses. Raises ConfigError."""
    attempted = f"load {used.path}:{name}"
    return function_of(used.text, Path(used.path), name, attempted=attempted, seconds=SECONDS, most=MOST)


def _read(said: Said, name: str) -> Found:
    value = said.value
    if value is None or math.isnan(value) or not 0 <= value <= 1:
        raise FunctionError(
            f"{name} must return a bool, a number in 0…1, or one of them and a reason, not {said.shown}"
        )
    return Found(float(value), f"{name} said {said.shown}" if said.reason is None else said.reason)


def line_of(exchange: Exchange) -> Mapping[str, Any]:
    """The line of the task; of a rollout, what is known of it under the same keys."""
    if "answer" in exchange.line:
        return exchange.line
    known = exchange.line.get("metadata", {})
    return {
        "main_query": exchange.query,
        "question": exchange.query,
        "answer": exchange.answer,
        "init_messages": list(exchange.history),
        "metadata": {
            "answer": exchange.answer,
            "reference": exchange.reference,
            "tools_json": orjson.dumps(exchange.tools).decode(),
            "trajectory_json": orjson.dumps(exchange.trajectory).decode(),
            **known,
        },
    }
