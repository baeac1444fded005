"""Functions in users' Python files, run in child processes (see system/child_process.py).

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
from pathlib import Path
from typing import Any, Final

from flywheel.errors import ConfigError
from flywheel.secrets import environment_without_secrets, redact_secrets
from flywheel.system.child_process import ChildEndedError, ChildPool, ChildProcess, python_command, serve

LOAD_SECONDS: Final = 60.0
"""Longest load of a file; some load a model."""
MAX_SHOWN: Final = 200
"""Characters of a returned value that are shown."""
MAX_REASON: Final = 10_000
"""Characters of a reason that are kept."""


class FunctionError(Exception):
    """A function failed on one value; the text is for the user."""


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
        self._load = json.dumps({"source": source, "path": str(path), "name": name, "attempted": attempted}).encode()
        self._attempted = attempted
        self._name = name
        self._seconds = seconds
        self._children: ChildPool[ChildProcess] = ChildPool(most)
        self.close = self._children.close
        with self._children.child(self._start):
            pass

    def __call__(self, value: Mapping[str, Any]) -> ReturnedValue:
        """Call the function. Raises FunctionError, and ConfigError if the function does not load any more."""
        request = json.dumps(value).encode()
        with self._children.child(self._start) as child:
            try:
                answer = json.loads(redact_secrets(child.ask(request, self._seconds)))
            except TimeoutError:
                why = f"ran longer than {self._seconds:g} s, and its process was ended"
                raise FunctionError(f"{self._name} {why}") from None
            except ChildEndedError as error:
                raise FunctionError(f"{self._name} ended its process ({error})") from None
        if "error" in answer:
            raise FunctionError(answer["error"])
        return ReturnedValue(**answer)

    def _start(self) -> ChildProcess:
        child = ChildProcess(python_command(__name__), environment_without_secrets())
        try:
            why = json.loads(redact_secrets(child.ask(self._load, LOAD_SECONDS)))["error"]
        except TimeoutError:
            why = f"it was not loaded after {LOAD_SECONDS:g} s"
        except ChildEndedError as error:
            why = f"it ended its process ({error})"
        if why:
            child.end()
            raise ConfigError(self._attempted, why, "Correct the file.")
        return child


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
    key = hashlib.sha256(json.dumps([text, str(path.absolute()), name, seconds, most, uses]).encode()).hexdigest()
    with _functions_lock:
        function = _functions.get(key)
        if function is None:
            function = PythonProcess(text, path, name, attempted=attempted, seconds=seconds, most=most)
            _functions[key] = function
        return function


def main() -> None:
    """The child process: loads what the first request names and answers the others."""
    # Modules beside the user's file are compiled anew: no cache beside them, and none that is older than a second.
    sys.dont_write_bytecode = True
    functions: list[Callable[..., Any]] = []

    def answer(request: bytes) -> bytes:
        value = json.loads(request)
        return json.dumps(_answer(functions[0], value) if functions else _answer_load(functions, value)).encode()

    serve(answer)


def _answer_load(functions: list[Callable[..., Any]], load: Mapping[str, str]) -> dict[str, Any]:
    try:
        source = load["source"].encode("utf-8", "surrogateescape")
        functions.append(_load_function(source, Path(load["path"]), load["name"], load["attempted"]))
    except ConfigError as error:
        return {"error": error.why}
    return {"error": ""}


def _answer(function: Callable[..., Any], value: Any) -> dict[str, Any]:
    try:
        returned = function(value)
        number, reason = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(number, bool):
            number = float(number) if isinstance(number, int | float) else None
        reason = None if reason is None else str(reason)[:MAX_REASON]
        return {"value": number, "reason": reason, "shown": repr(returned)[:MAX_SHOWN]}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _load_function(source: bytes, path: Path, name: str, attempted: str) -> Callable[..., Any]:
    """The function `name` of a file's text. Raises ConfigError if the text does not run or has no such function."""
    # Not by the import system, which would write bytecode beside the user's file. The module is registered, because
    # dataclasses look theirs up.
    digest = hashlib.sha256(str(path.absolute()).encode() + source).hexdigest()[:16]
    module = types.ModuleType(f"flywheel_file_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(attempted, f"{type(error).__name__}: {error}", "Correct the file.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(attempted, f"it has no function {name}", "Name one that is in the file.")
    return function  # type: ignore[no-any-return]
