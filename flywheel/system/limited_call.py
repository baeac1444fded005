"""Functions of modules, called in child processes with limits: what they are given can take any time and memory.

The children import only what the function's module does. Their environment holds no keys.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from flywheel.secrets import environment_without_secrets, redact_secrets
from flywheel.system.child_process import ChildEndedError, ChildPool, ChildProcess, python_command, serve

ATTEMPTS: Final = 2
"""Of a call with a limit of processor time: a child may also have been ended by something else."""
MAX_PROCESSES: Final = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one call. By default, those of our own functions, for what others wrote."""

    seconds: float = 120.0
    """For a child that hangs, or waits."""
    cpu_seconds: float = 1.0
    """Processor time, which does not depend on what else runs; 0 for any."""
    memory: int = 2 << 30
    """Bytes that the call may take beside what the child has; 0 for any."""


class FunctionError(Exception):
    """A function failed on one value. Of another error, the text begins with its class."""


class CostlyCallError(FunctionError):
    """A call exceeded the limits, or ended its process. The text goes on after the name of what was called."""


Call = Callable[[Callable[[Any], Any], Any, Limits], Any]
"""Calls a function with a value, within limits."""


class Children(ChildPool[ChildProcess]):
    """Children that call functions. With `prepare`, each first makes the calls that it makes of it."""

    def __init__(self, most: int, prepare: Callable[[Call], object] | None = None) -> None:
        super().__init__(most)
        self._prepare = prepare

    def start(self) -> ChildProcess:
        child = _start()
        try:
            if self._prepare is not None:
                self._prepare(partial(_answer, child))
        except BaseException:
            child.end()
            raise
        return child


_children: Final = Children(MAX_PROCESSES)


def call_in_child(
    function: Callable[[Any], Any], value: Any, limits: Limits | None = None, children: Children | None = None
) -> Any:
    """What a function of a module returns for a value, in one of `children`; both are values of JSON. Raises
    FunctionError, and OSError if no child can be started."""
    limits, children = limits or Limits(), children or _children
    for left in reversed(range(ATTEMPTS if limits.cpu_seconds else 1)):
        with children.child(children.start) as child:
            try:
                return _answer(child, function, value, limits)
            except CostlyCallError:
                if not left:
                    raise
    raise AssertionError


def _answer(child: ChildProcess, function: Callable[[Any], Any], value: Any, limits: Limits) -> Any:
    names = function.__module__, function.__name__
    request = json.dumps([*names, limits.cpu_seconds, limits.memory, value]).encode()
    try:
        answer = json.loads(redact_secrets(child.ask(request, limits.seconds)))
    except (TimeoutError, ChildEndedError) as error:
        if limits.cpu_seconds:
            most = f"{limits.cpu_seconds:g} s of processor time or {limits.memory >> 20:,} MB of memory"
            raise CostlyCallError(f"takes more than {most}") from None
        if isinstance(error, TimeoutError):
            raise CostlyCallError(f"ran longer than {limits.seconds:g} s, and its process was ended") from None
        raise CostlyCallError(f"ended its process ({error})") from None
    if "error" in answer:
        raise FunctionError(answer["error"])
    return answer["value"]


def _start() -> ChildProcess:
    return ChildProcess(python_command(__name__), environment_without_secrets())


def main() -> None:
    """The child process."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]

    def answer(request: bytes) -> bytes:
        module, name, cpu_seconds, memory, value = json.loads(request)
        function = getattr(importlib.import_module(module), name)
        if memory:
            limit = memory + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))
        # At its end, the signal ends this process.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            found = json.dumps({"value": function(value)}).encode()
        except (Exception, SystemExit) as error:
            if memory and isinstance(error, MemoryError):
                os._exit(1)
            text = str(error) if isinstance(error, FunctionError) else f"{type(error).__name__}: {error}"
            found = json.dumps({"error": text}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return found

    serve(answer)
