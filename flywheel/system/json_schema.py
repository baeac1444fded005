"""JSON Schemas, applied in child processes: one that comes with a trace can take any time and memory.

One that exceeds the limits is remembered and not tried again.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Any, Final, NoReturn

from flywheel.system.limited_call import CostlyCallError, FunctionError, call_in_child

MAX_KNOWN: Final = 256
"""Schemas that a child keeps."""
MAX_PROBLEM: Final = 300
"""Characters of a problem."""

_costly: Final[dict[str, str]] = {}
"""The schemas that exceeded the limits, by their hashes, with the error."""


def problems(schema: Any, values: list[Any], *, remember: bool = True) -> list[str]:
    """What is wrong with each value, and where; empty where nothing is.

    Nothing is fetched. Without `remember`, the schema is used again after it has exceeded the limits. Raises
    CostlyCallError then, and FunctionError for a schema that cannot be used.
    """
    try:
        text = json.dumps(schema, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if remember and digest in _costly:
            raise CostlyCallError(_costly[digest])
        return list(call_in_child(problems_here, [text, values]))
    except RecursionError:
        raise FunctionError("it is nested too deeply") from None
    except CostlyCallError as error:
        if remember:
            _costly[digest] = str(error)
        raise


def problems_here(question: tuple[str, list[Any]]) -> list[str]:
    """The same in this process, of the schema's JSON. Raises FunctionError."""
    schema, values = question
    try:
        return [_problem(_validator(schema), value) for value in values]
    except (ValueError, TypeError, RecursionError) as error:
        raise FunctionError(str(error).partition("\n")[0][:MAX_PROBLEM]) from None


@lru_cache(maxsize=MAX_KNOWN)
def _validator(schema: str) -> Any:
    from jsonschema_rs import validator_for

    return validator_for(json.loads(schema), retriever=_fetch_nothing)


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
