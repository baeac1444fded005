"""Functions in users' Python files, run in child processes.

A thread cannot be ended, and neither could what it holds (the interpreter, a lock, a connection). A function that
hangs, crashes, exits, prints or fills the memory costs one call and its child process.

A child answers each line of JSON on its input with one on its output. It ends when its input ends, so a killed parent
leaves nothing behind. What a function starts ends with its child: they are one process group, unless a program calls
setsid. The child's environment holds no API keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from flywheel.errors import ConfigError
from flywheel.known_secrets import environment_without_secrets, redact_secrets

LOAD_SECONDS: Final = 60.0
"""Longest load of a file; some load a model."""
MAX_SHOWN: Final = 200
"""Characters of a returned value that are shown."""


class FunctionError(Exception):
    """A function failed on one value; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Returned:
    """What a function returned, or its value and its reason if it returned two."""

    value: bool | float | None
    """None for anything but a bool or a number."""
    reason: str | None
    """The second of two values."""
    shown: str
    """The repr of what was returned, shortened."""


class ChildProcess:
    """A Python process that runs `main` of one of our modules. One request at a time."""

    def __init__(self, module: str) -> None:
        # By our own path and with -P: no file of the current directory is imported.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_without_secrets(),
            # Of its own: Ctrl-C is meant for the parent, and what the function starts ends with the group.
            process_group=0,
        )

    def ask(self, request: str, seconds: float) -> Any:
        """The answer to one line of JSON. Raises TimeoutError, and EOFError when the process ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # reading then finds the end
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        # Not select, which cannot wait for file descriptors above 1,023.
        waiting = select.poll()
        waiting.register(self._process.stdout, select.POLLIN)
        if not waiting.poll(max(0.0, seconds) * 1000):
            raise TimeoutError
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(redact_secrets(line))

    def end(self) -> int:
        """Kill the process and what it has started. Returns its exit code."""
        # Before the wait: until then the number belongs to this group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return code


class PythonProcess:
    """One function in up to `most` child processes, each of which runs one call at a time. Thread-safe."""

    def __init__(self, source: str, path: Path, name: str, *, attempted: str, seconds: float, most: int = 1) -> None:
        """`seconds` bounds a call. Raises ConfigError if the file or the function does not load."""
        self._load = json.dumps({"source": source, "path": str(path), "name": name, "attempted": attempted})
        self._attempted = attempted
        self._name = name
        self._seconds = seconds
        self._free = threading.Semaphore(most)
        self._idle: list[ChildProcess] = []
        # Also at exit.
        self.close = weakref.finalize(self, _end_all, self._idle)
        self._idle.append(self._start())

    def __call__(self, value: Mapping[str, Any]) -> Returned:
        """Call the function. Raises FunctionError, and ConfigError if the function does not load any more."""
        request = json.dumps(value)
        with self._free:
            try:
                child = self._idle.pop()
            except IndexError:
                child = self._start()
            try:
                answer = child.ask(request, self._seconds)
            except TimeoutError:
                child.end()
                why = f"ran longer than {self._seconds:g} s, and its process was ended"
                raise FunctionError(f"{self._name} {why}") from None
            except EOFError:
                code = child.end()
                why = f"exit code {code}" if code >= 0 else f"signal {-code}"
                raise FunctionError(f"{self._name} ended its process ({why})") from None
            except BaseException:
                child.end()
                raise
            self._idle.append(child)
        if not self.close.alive:  # closed in the meantime, which could not end this one
            _end_all(self._idle)
        if "error" in answer:
            raise FunctionError(answer["error"])
        return Returned(**answer)

    def _start(self) -> ChildProcess:
        child = ChildProcess(__name__)
        try:
            why = child.ask(self._load, LOAD_SECONDS)["error"]
        except TimeoutError:
            why = f"it was not loaded after {LOAD_SECONDS:g} s"
        except EOFError:
            why = "it ended its process"
        except BaseException:
            child.end()
            raise
        if why:
            child.end()
            raise ConfigError(self._attempted, why, "Correct the file.")
        return child


def _end_all(children: list[ChildProcess]) -> None:
    while children:
        children.pop().end()


_functions: weakref.WeakValueDictionary[str, PythonProcess] = weakref.WeakValueDictionary()
_functions_lock = threading.Lock()


def function_of(
    source: bytes | str, path: Path, name: str, *, attempted: str, seconds: float, most: int = 1
) -> PythonProcess:
    """A function of a file's text. Equal arguments share one, as long as somebody holds it. Raises ConfigError."""
    text = source if isinstance(source, str) else source.decode("utf-8", "surrogateescape")
    key = hashlib.sha256(json.dumps([text, str(path.absolute()), name, seconds, most]).encode()).hexdigest()
    with _functions_lock:
        function = _functions.get(key)
        if function is None:
            function = PythonProcess(text, path, name, attempted=attempted, seconds=seconds, most=most)
            _functions[key] = function
        return function


def main() -> None:
    """The child process: loads what the first line names and answers the others, until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when the child ends
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The user's code gets other standard streams: what it reads and prints is no part of the protocol.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read_requests() -> None:
        for line in requests:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)  # the parent is gone; this ends the child and what it started

    threading.Thread(target=read_requests, daemon=True).start()
    _serve(lines.get, answers)


def _serve(next_line: Callable[[], bytes], answers: IO[bytes]) -> None:
    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    load = json.loads(next_line())
    try:
        source = load["source"].encode("utf-8", "surrogateescape")
        function = _load_function(source, Path(load["path"]), load["name"], load["attempted"])
    except ConfigError as error:
        send({"error": error.why})
        return
    send({"error": ""})
    while True:
        request = json.loads(next_line())
        try:
            returned = function(request)
            value, reason = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
            if not isinstance(value, bool):
                value = float(value) if isinstance(value, int | float) else None
            reason = None if reason is None else str(reason)
            answer = {"value": value, "reason": reason, "shown": repr(returned)[:MAX_SHOWN]}
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        send(answer)


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
