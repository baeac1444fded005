"""Our own functions, called in child processes with limits: what they are given can take any time and memory."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from flywheel.secrets import environment_without_secrets
from flywheel.system.child_process import ChildEndedError, ChildPool, ChildProcess, python_command, serve

CPU_SECONDS: Final = 1.0
"""Longest call, in processor time, which does not depend on what else runs."""
SECONDS: Final = 120.0
"""For a child that hangs."""
MEMORY_BYTES: Final = 2 << 30
ATTEMPTS: Final = 2
"""A child may also have been ended by something else."""
MAX_PROCESSES: Final = 4

_children: Final[ChildPool[ChildProcess]] = ChildPool(MAX_PROCESSES)


class CostlyCallError(Exception):
    """A call that exceeds the limits."""


def call_limited(function: Callable[[Any], Any], value: Any, *, memory: int = MEMORY_BYTES) -> Any:
    """What a function of a module returns for a value; both are values of JSON. `memory` is what the call may take,
    in bytes. Raises CostlyCallError."""
    request = json.dumps([function.__module__, function.__name__, memory, value]).encode()
    for _ in range(ATTEMPTS):
        with contextlib.suppress(TimeoutError, ChildEndedError), _children.child(_start) as child:
            return json.loads(child.ask(request, SECONDS))
    limits = f"{CPU_SECONDS:g} s of processor time or {memory >> 20:,} MB of memory"
    raise CostlyCallError(f"takes more than {limits}")


def _start() -> ChildProcess:
    return ChildProcess(python_command(__name__), environment_without_secrets())


def main() -> None:
    """The child process."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]

    def answer(request: bytes) -> bytes:
        module, name, memory, value = json.loads(request)
        function = getattr(importlib.import_module(module), name)
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + memory if most < 0 else min(own + memory, most), most))
        # At its end, the signal ends this process.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            found = json.dumps(function(value)).encode()
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return found

    serve(answer)
