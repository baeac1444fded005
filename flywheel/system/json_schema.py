"""JSON Schemas, applied in child processes: one that comes with a trace can take any time and memory.

A schema is sent to a child once. One that exceeds the limits is remembered and not tried again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import signal
from typing import Any, Final, NoReturn

from flywheel.secrets import environment_without_secrets
from flywheel.system.child_process import ChildEndedError, ChildPool, ChildProcess, python_command, serve

CPU_SECONDS: Final = 1.0
"""Longest use of one schema, in processor time, which does not depend on what else runs."""
SECONDS: Final = 120.0
"""For a child that hangs."""
MEMORY_BYTES: Final = 2 << 30
"""Address space of a child."""
ATTEMPTS: Final = 2
"""A child may also have been ended by something else."""
MAX_PROCESSES: Final = 4
MAX_KNOWN: Final = 256
"""Schemas that a child keeps."""
MAX_PROBLEM: Final = 300
"""Characters of a problem."""

_children: Final[ChildPool[ChildProcess]] = ChildPool(MAX_PROCESSES)
_costly: Final[set[str]] = set()
"""Hashes of the schemas that exceeded the limits."""


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
        asked = json.dumps({"hash": digest, "values": values}).encode()
        whole_request = json.dumps({"hash": digest, "values": values, "schema": schema}).encode()
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    for _ in range(0 if remember and digest in _costly else ATTEMPTS):
        with contextlib.suppress(TimeoutError, ChildEndedError), _children.child(_start) as child:
            answer = json.loads(child.ask(asked, SECONDS)) or json.loads(child.ask(whole_request, SECONDS))
            if "error" in answer:
                raise SchemaError(answer["error"])
            return list(answer["problems"])
    if remember:
        _costly.add(digest)
    raise CostlySchemaError(
        f"takes more than {CPU_SECONDS:g} s of processor time or {MEMORY_BYTES >> 30} GB of memory"
    )


def _start() -> ChildProcess:
    return ChildProcess(python_command(__name__), environment_without_secrets())


def main() -> None:
    """The child process."""
    from jsonschema_rs import validator_for

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    known: dict[str, Any] = {}

    def answer(request: bytes) -> bytes:
        # At its end, the signal ends this process.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        found = json.dumps(_answer(json.loads(request))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        return found

    def _answer(question: dict[str, Any]) -> dict[str, Any]:
        key = question["hash"]
        try:
            if key not in known:
                if "schema" not in question:
                    return {}
                if len(known) == MAX_KNOWN:
                    known.clear()
                known[key] = validator_for(question["schema"], retriever=_fetch_nothing)
            return {"problems": [_problem(known[key], value) for value in question["values"]]}
        except (ValueError, TypeError, RecursionError) as error:
            return {"error": str(error).partition("\n")[0][:MAX_PROBLEM]}

    serve(answer)


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
