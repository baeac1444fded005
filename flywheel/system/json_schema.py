"""JSON Schemas, applied in child processes: one that comes with a trace can take any time and memory.

A schema is sent to a child once. One that exceeds the limits is remembered and not tried again.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NoReturn

from flywheel.system.limited_call import CostlyCallError, call_limited

MAX_KNOWN: Final = 256
"""Schemas that a child keeps."""
MAX_PROBLEM: Final = 300
"""Characters of a problem."""

_costly: Final[dict[str, str]] = {}
"""The schemas that exceeded the limits, by their hashes, with the error."""
_known: Final[dict[str, Any]] = {}
"""In a child: validators by the hashes of their schemas."""


class SchemaError(Exception):
    """A schema that cannot be used; the text says why."""


class CostlySchemaError(SchemaError):
    """A schema that exceeds the limits."""


def problems(schema: Any, values: list[Any], *, remember: bool = True) -> list[str]:
    """What is wrong with each value, and where; empty where nothing is.

    Nothing is fetched. Without `remember`, the schema is used again after it has exceeded the limits. Raises
    SchemaError and CostlySchemaError.
    """
    try:
        digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    asked = {"hash": digest, "values": values}
    if remember and digest in _costly:
        raise CostlySchemaError(_costly[digest])
    try:
        answer = call_limited(answered, asked) or call_limited(answered, {**asked, "schema": schema})
    except CostlyCallError as error:
        if remember:
            _costly[digest] = str(error)
        raise CostlySchemaError(str(error)) from None
    if "error" in answer:
        raise SchemaError(answer["error"])
    return list(answer["problems"])


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """In a child: the problems of values, or the error of their schema; empty if the child has yet to get it."""
    from jsonschema_rs import validator_for

    key = question["hash"]
    try:
        if key not in _known:
            if "schema" not in question:
                return {}
            if len(_known) == MAX_KNOWN:
                _known.clear()
            _known[key] = validator_for(question["schema"], retriever=_fetch_nothing)
        return {"problems": [_problem(_known[key], value) for value in question["values"]]}
    except (ValueError, TypeError, RecursionError) as error:
        return {"error": str(error).partition("\n")[0][:MAX_PROBLEM]}


def _fetch_nothing(_uri: str) -> NoReturn:
    raise ValueError("it is not in the schema, and nothing is fetched")


def _problem(validator: Any, value: Any) -> str:
    try:
        error = next(validator.iter_errors(value), None)
    except UnicodeError:
        return "it has half of a character"
    if error is None:
        return ""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
    return f"at ${place}: {error.message}"[:MAX_PROBLEM]
