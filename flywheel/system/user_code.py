"""Functions in users' Python files, run in child processes (see system/limited_call.py).

A thread cannot be ended, and neither could what it holds (the interpreter, a lock, a connection). A function that
hangs, crashes, exits, prints or fills the memory costs one call and its child process. What it starts ends with the
child: they are one process group, unless a program calls setsid. The child's environment holds no API keys.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from flywheel.errors import ConfigError
from flywheel.system.limited_call import Call, Children, CostlyCallError, FunctionError, Limits, call_in_child

LOAD_SECONDS: Final = 60.0
"""Longest load of a file; some load a model."""
MAX_SHOWN: Final = 200
"""Characters of a returned value that are shown."""
MAX_REASON: Final = 10_000
"""Characters of a reason that are kept."""


@dataclass(frozen=True, slots=True)
class ReturnedValue:
    """What a function returned, or its value and its reason if it returned two."""

    value: bool | float | None
    """None for anything but a bool or a number."""
    reason: str | None
    """The second of two values."""
    shown: str
    """The repr of what was returned, shortened."""


class PythonProcess:
    """One function in up to `most` child processes, each of which runs one call at a time. Thread-safe."""

    def __init__(self, source: str, path: Path, name: str, *, attempted: str, seconds: float, most: int = 1) -> None:
        """`seconds` bounds a call. Raises ConfigError if the file or the function does not load."""
        load = {"source": source, "path": str(path), "name": name}
        self._name = name
        self._limits = Limits(seconds, cpu_seconds=0, memory=0)
        self._children = Children(most, partial(_prepare, load, attempted))
        self.close = self._children.close
        with self._children.child(self._children.start):
            pass

    def __call__(self, value: Mapping[str, Any]) -> ReturnedValue:
        """Call the function. Raises FunctionError, and ConfigError if the function does not load any more."""
        try:
            return ReturnedValue(**call_in_child(_called, value, self._limits, self._children))
        except CostlyCallError as error:
            raise FunctionError(f"{self._name} {error}") from None


def _prepare(load: Mapping[str, str], attempted: str, call: Call) -> None:
    try:
        call(_load, load, Limits(LOAD_SECONDS, cpu_seconds=0, memory=0))
    except FunctionError as error:
        why = f"it {error}" if isinstance(error, CostlyCallError) else str(error)
        raise ConfigError(attempted, why, "Correct the file.") from None


_functions: weakref.WeakValueDictionary[str, PythonProcess] = weakref.WeakValueDictionary()
_functions_lock = threading.Lock()


def function_of(
    source: bytes | str,
    path: Path,
    name: str,
    *,
    attempted: str,
    seconds: float,
    most: int = 1,
    uses: Sequence[Sequence[str]] = (),
) -> PythonProcess:
    """A function of a file's text. Equal arguments share one, as long as somebody holds it. `uses` are names and
    hashes of modules that the file imports: a process that has imported others stays as it is. Raises ConfigError."""
    text = source if isinstance(source, str) else source.decode("utf-8", "surrogateescape")
    key = json.dumps([text, str(path.absolute()), name, seconds, most, uses])
    with _functions_lock:
        function = _functions.get(key)
        if function is None:
            function = PythonProcess(text, path, name, attempted=attempted, seconds=seconds, most=most)
            _functions[key] = function
        return function


_loaded: Final[list[Callable[..., Any]]] = []
"""In a child: the function."""


def _load(file: Mapping[str, str]) -> None:
    """In a child: load the function `name` of a file's text. Raises FunctionError if there is none, and what the text
    raises."""
    # Modules beside the user's file are compiled anew: no cache beside them, and none that is older than a second.
    sys.dont_write_bytecode = True
    source, path = file["source"].encode("utf-8", "surrogateescape"), Path(file["path"])
    # Not by the import system, which would write bytecode beside the user's file. The module is registered, because
    # dataclasses look theirs up.
    digest = hashlib.sha256(str(path.absolute()).encode() + source).hexdigest()[:16]
    module = types.ModuleType(f"flywheel_file_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    if not callable(function := getattr(module, file["name"], None)):
        raise FunctionError(f"it has no function {file['name']}")
    _loaded.append(function)


def _called(value: Any) -> dict[str, Any]:
    """In a child: what the function returns, as a ReturnedValue."""
    returned = _loaded[0](value)
    number, reason = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(number, bool):
        number = float(number) if isinstance(number, int | float) else None
    reason = None if reason is None else str(reason)[:MAX_REASON]
    return {"value": number, "reason": reason, "shown": repr(returned)[:MAX_SHOWN]}
