"""A function of the user's own: it is given the task's line and says how far the criterion holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from flywheel.errors import CheckError, ConfigError
from flywheel.judge.checks.found import Found
from flywheel.python_source import load_function
from flywheel.rubric import Criterion, Rubric, UsedFile
from flywheel.verdict import Exchange


def says_yes(criterion: Criterion, exchange: Exchange, rubric: Rubric | None) -> Found:
    name = str(criterion.value).rpartition(":")[2]
    attempted = f"decide criterion {criterion.id} by {criterion.value}"
    if rubric is None or criterion.file not in rubric.files:
        raise CheckError(attempted, "its file was not read", "Read the rubric from a file.")
    try:
        function = load(rubric.files[criterion.file], name)
    except ConfigError as error:
        raise CheckError(attempted, error.why, error.hint) from error
    try:
        # A copy: what it does to the line must not reach the other criteria, the judge or the task file.
        return _read(function(copy.deepcopy(line_of(exchange))), name)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckError(attempted, why, "Correct the function; the task is judged again later.") from error


@lru_cache(maxsize=64)
def load(used: UsedFile, name: str) -> Callable[[Mapping[str, Any]], Any]:
    """The function of a file that a rubric uses. Raises ConfigError."""
    return load_function(used.text, Path(used.path), name, f"load {used.path}:{name}")


def _read(said: Any, name: str) -> Found:
    value, reason = said if isinstance(said, tuple) and len(said) == 2 else (said, f"{name} said {said!r}")
    if isinstance(value, bool | int | float) and not math.isnan(value) and 0 <= value <= 1:
        return Found(float(value), str(reason))
    raise TypeError(f"{name} must return a bool, a number in 0…1, or one of them and a reason, not {said!r}")


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
