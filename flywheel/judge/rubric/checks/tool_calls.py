"""The checks of the steps: which tools were called and in which order, what failed, timed out or was repeated.

`call-format` is in a module of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from flywheel.judge.rubric.criterion import (
    Criterion,
    Example,
    Files,
    Penalty,
    Reward,
    Tools,
    ToolsOrNone,
    checked,
    invalid,
    require_weight,
    tool_names,
)
from flywheel.records.tool_calls import Call, calls_in, functions_by_name
from flywheel.records.trace import get_path
from flywheel.records.verdict import Exchange

UNKNOWN_EFFICIENCY: Final = 0.5
"""The `step-efficiency` of a reply without calls: nothing was wasted, and nothing was done."""
_TIMEOUT: Final = re.compile(
    r"\b\w*(?:Timeout|TimedOut)(?:Error|Exception|Expired)?(?=[:(]|$)|\bETIMEDOUT\b|\b(?i:timed[ -]out)\b"
    r"|\b(?i:deadline[ _]?exceeded|gateway time-?out|exceeded the timeout|timeout exceeded)\b",
    re.MULTILINE,
)
"""Names of exceptions, and phrases of clients. Only failures are searched: a result may be about anything."""
_PROGRAM_TIMEOUT: Final = re.compile(
    r"\A<returncode>-1</returncode>.*\bTimeoutError: The \w+ execution exceeded the timeout", re.DOTALL
)
"""What AgentScope 1.x returns of a program that it has stopped."""
_SECONDS: Final = {"type": "number", "exclusiveMinimum": 0}


def calls_of(exchange: Exchange) -> list[Call]:
    """The tool calls of an exchange with their results, in order."""
    return calls_in(exchange.trajectory, _errors(exchange.line.get("metadata")))


def called_tools(exchange: Exchange) -> list[str]:
    """Names of the tools that were called, in order."""
    return [call.name for call in calls_of(exchange)]


class Steps(Criterion):
    """A check of tool calls and other steps."""

    def is_decided(self, example: Example) -> bool:
        return example.trajectory is not None


class ToolCalled(Steps):
    """Tools of these names were called, so many times together."""

    type: Literal["tool-called"] = "tool-called"
    value: Tools
    min: int | None = Field(default=None, ge=0, exclude_if=lambda value: value is None)
    """The fewest calls. Default: 1, or 0 when `max` is 0."""
    max: int | None = Field(default=None, ge=0, exclude_if=lambda value: value is None)
    """The most calls. Default: any number."""

    @field_validator("max")
    @classmethod
    def _can_be_met(cls, most: int | None, info: ValidationInfo) -> int | None:
        if most is not None and (least := info.data.get("min")) is not None and least > most:
            raise invalid(f"min {least} is more than max {most}: no reply can meet that", "min")
        return most

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        names = called_tools(exchange)
        count = sum(name in tool_names(self.value) for name in names)
        least = self.min if self.min is not None else 0 if self.max == 0 else 1
        return least <= count and (self.max is None or count <= self.max), listed(names)


class ToolSequence(Steps):
    """The tools were called in this order."""

    type: Literal["tool-sequence"] = "tool-sequence"
    value: Tools
    match: Literal["exact", "subsequence"] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Whether it lists all calls, or calls that others may stand between (the default)."""

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        names, wanted = called_tools(exchange), list(tool_names(self.value))
        if self.match == "exact":
            return names == wanted, listed(names)
        remaining = iter(names)
        return all(name in remaining for name in wanted), listed(names)


def listed(names: list[str]) -> str:
    """The called tools, as a reason."""
    return f"tools called: {', '.join(names) or 'none'}"


class NoErrorSpan(Steps):
    """No tool call and no model call failed on the way."""

    type: Literal["no-error-span"] = "no-error-span"
    weight: Reward = 1.0

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        """Errors are in the task's `metadata.errors_json`; a tool message can also carry the status `error`."""
        failed = [
            f"tool {turn.get('name') or '?'}"
            for turn in exchange.trajectory
            if turn.get("role") == "tool" and turn.get("status") == "error"
        ]
        failed += [str(error) for error in _errors(exchange.line.get("metadata"))]
        return not failed, f"failed: {'; '.join(failed)}"[:300] if failed else "no step failed"


def _errors(metadata: Any) -> list[Any]:
    try:
        errors = orjson.loads(metadata["errors_json"])
    except (KeyError, TypeError, orjson.JSONDecodeError):
        return []
    return errors if isinstance(errors, list) else []


class RedundantCall(Steps):
    """A tool was called again with the same arguments and the same result; these tools may be."""

    model_config = ConfigDict(json_schema_extra=require_weight)
    type: Literal["redundant-call"] = "redundant-call"
    value: ToolsOrNone = ""
    weight: Penalty = 1.0

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        repeated = list(_redundant(calls_of(exchange), exchange, tool_names(self.value)))
        names = ", ".join(sorted({call.name for call in repeated}))
        return bool(repeated), f"repeated for nothing: {names}" if repeated else "no call was repeated for nothing"


class StepEfficiency(Steps):
    """The share of calls that neither failed nor repeated an earlier one; these tools may be repeated."""

    type: Literal["step-efficiency"] = "step-efficiency"
    value: ToolsOrNone = ""
    weight: Reward = 1.0
    max: int | None = Field(default=None, ge=0, exclude_if=lambda value: value is None)
    """The calls that are enough. Default: any number."""

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        calls = calls_of(exchange)
        if not calls:
            return UNKNOWN_EFFICIENCY, "no tool was called"
        failed = sum(call.failed for call in calls)
        repeated = sum(not call.failed for call in _redundant(calls, exchange, tool_names(self.value)))
        useful = len(calls) - failed - repeated
        enough = useful if self.max is None else min(useful, self.max)
        return enough / len(calls), f"{len(calls)} calls, {failed} failed, {repeated} repeated for nothing"


def _redundant(calls: Sequence[Call], exchange: Exchange, may_repeat: Sequence[str]) -> Iterator[Call]:
    """Calls that repeat the last one of the same tool and arguments, and brought the same result. A failed one may be
    repeated once."""
    defaults = {name: _defaults(function) for name, function in functions_by_name(exchange.tools).items()}
    last: dict[tuple[str, str], tuple[str | None, int]] = {}
    for call in calls:
        if call.name in may_repeat:
            continue
        try:
            arguments = json.dumps({**defaults.get(call.name, {}), **call.parsed}, sort_keys=True)
        except (ValueError, TypeError, RecursionError):
            arguments = str(call.arguments)
        result, times = last.get((call.name, arguments), (None, 0))
        times = times + 1 if call.result == result else 1
        last[call.name, arguments] = call.result, times
        if times > (2 if call.failed else 1):
            yield call


def _defaults(function: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a tool's parameters: a call that leaves them out is the same as one that gives them."""
    properties = get_path(function, "parameters", "properties")
    return {
        name: schema["default"]
        for name, schema in (properties.items() if isinstance(properties, dict) else ())
        if isinstance(schema, dict) and "default" in schema
    }


def _check_seconds(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("it must be a number of seconds above 0")


class Timeout(Steps):
    """A step timed out, or the reply took more than so many seconds."""

    model_config = ConfigDict(json_schema_extra=require_weight)
    type: Literal["timeout"] = "timeout"
    value: Annotated[int | float | str, checked(_check_seconds, optional=True), WithJsonSchema(_SECONDS)] = ""
    weight: Penalty = 1.0

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        metadata = exchange.line.get("metadata")
        failures = [str(error) for error in _errors(metadata)]
        for call in calls_of(exchange):
            if call.result is not None and (call.failed or _PROGRAM_TIMEOUT.match(call.result)):
                failures.append(f"tool {call.name}: {call.result}")
        if late := next((each for each in failures if _TIMEOUT.search(each)), None):
            return True, f"timed out: {late}"[:300]
        seconds = _seconds(metadata) if self.value else None
        if seconds is not None and seconds > float(self.value):
            return True, f"the reply took {seconds:.1f} s"
        return False, "no step timed out"


def _seconds(metadata: Any) -> float | None:
    """How long the reply took; None if its times are not recorded."""
    try:
        began, ended = (datetime.fromisoformat(metadata[key]) for key in ("started_at", "ended_at"))
        return (ended - began).total_seconds()
    except (KeyError, TypeError, ValueError):
        return None
