"""Functions of users' files in processes of their own: one that hangs is ended with its process, and costs one call.

A thread cannot be ended, and what it holds (the interpreter, a lock, a connection) it would hold for ever. Nor does a
function that crashes, leaves, prints or fills the memory do that to us.

The child reads one JSON value a line and answers each with one. It ends with its standard input, whatever it is
doing, so that a parent that is killed leaves nothing behind. What a function starts ends with the child: both are one
process group. Only a program that makes a session of its own (setsid) leaves it. API keys are not in its environment.
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
from flywheel.known_secrets import environment, hidden

LOADING_SECONDS: Final = 60.0
"""What loading a file may take: some load a model."""
SHOWN: Final = 200
"""Characters of a value that is quoted."""


class FunctionError(Exception):
    """A function broke on what it was given; the text is for a person."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a function returned: `value` is None for what is neither a truth value nor a number; `reason` is given by
    those that return two. `shown` is how it looks."""

    value: bool | float | None
    reason: str | None
    shown: str


class PythonProcess:
    """One function, in up to `most` processes, each of which answers one caller at a time. Thread-safe."""

    def __init__(self, source: str, path: Path, name: str, *, attempted: str, seconds: float, most: int = 1) -> None:
        """`seconds` bounds a call. Raises ConfigError when the text or the function does not load."""
        self._first = {
            "source": source,
            "path": str(path),
            "name": name,
            "attempted": attempted,
            "sys_path": sys.path,
        }
        self._attempted = attempted
        self._name = name
        self._seconds = seconds
        self._free = threading.Semaphore(most)
        self._idle: list[_Child] = []
        # At exit too: no process is waited for that nobody will ask again.
        self.close = weakref.finalize(self, _end_all, self._idle)
        self._idle.append(self._started())

    def __call__(self, value: Mapping[str, Any]) -> Said:
        """What the function says of a value. Raises FunctionError, and ConfigError if it does not load any more."""
        asked = json.dumps(value)
        with self._free:
            child = self._taken()
            try:
                answer = child.answer(asked, self._seconds)
            except TimeoutError:
                child.end()
                raise FunctionError(
                    f"{self._name} ran longer than {self._seconds:g} s, and its process was ended"
                ) from None
            except EOFError:
                code = child.end()
                why = f"exit code {code}" if code >= 0 else f"signal {-code}"
                raise FunctionError(f"{self._name} ended its process ({why})") from None
            except BaseException:
                child.end()
                raise
            self._idle.append(child)
        if "error" in answer:
            raise FunctionError(answer["error"])
        return Said(**answer)

    def _taken(self) -> _Child:
        try:
            return self._idle.pop()
        except IndexError:
            return self._started()

    def _started(self) -> _Child:
        child = _Child()
        why = ""
        try:
            why = child.answer(json.dumps(self._first), LOADING_SECONDS)["error"]
        except TimeoutError:
            why = f"it was not loaded after {LOADING_SECONDS:g} s"
        except EOFError:
            why = "it ended its process"
        finally:
            if why:
                child.end()
        if why:
            raise ConfigError(self._attempted, why, "Correct the file.")
        return child


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            # A signal to our group, as Ctrl-C is, means us; and what the function starts ends with the child's.
            process_group=0,
        )

    def answer(self, asked: str, seconds: float) -> Any:
        """Raises TimeoutError, and EOFError when the process ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is nothing to read either
            self._process.stdin.write(asked.encode() + b"\n")
            self._process.stdin.flush()
        if not has_come(self._process.stdout, seconds):
            raise TimeoutError
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(hidden(line))

    def end(self) -> int:
        """End it and what it has started; its exit code."""
        # Before it is waited for: until then its number is no other group's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return code


def command(module: str) -> list[str]:
    """What starts the `main` of a module of ours, by our own path: no file of the current directory is meant."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main()"]


def has_come(pipe: IO[Any], seconds: float) -> bool:
    """Whether something can be read within a time. By poll: select knows no file beyond the thousandth."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


_known: weakref.WeakValueDictionary[str, PythonProcess] = weakref.WeakValueDictionary()
_loading = threading.Lock()


def function_of(
    source: bytes | str, path: Path, name: str, *, attempted: str, seconds: float, most: int = 1
) -> PythonProcess:
    """The function of a file's text; the one that is there, while somebody has it. Raises ConfigError."""
    text = source if isinstance(source, str) else source.decode("utf-8", "surrogateescape")
    key = hashlib.sha256(json.dumps([text, str(path.absolute()), name, seconds, most]).encode()).hexdigest()
    with _loading:
        found = _known.get(key)
        if found is None:
            found = PythonProcess(text, path, name, attempted=attempted, seconds=seconds, most=most)
            _known[key] = found
        return found


def main() -> None:
    """The child: load what the first line says, and answer the others, until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when it ends
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the file and the programs that it starts read and print is not from us, and not for us.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in asked:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)  # this process too: the parent is gone, and nobody else ends what it started

    threading.Thread(target=listen, daemon=True).start()
    _serve(lines.get, answers)


def _serve(next_line: Callable[[], bytes], answers: IO[bytes]) -> None:
    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    first = json.loads(next_line())
    try:
        source = first["source"].encode("utf-8", "surrogateescape")
        function = load_function(source, Path(first["path"]), first["name"], first["attempted"])
    except ConfigError as error:
        tell({"error": error.why})
        return
    tell({"error": ""})
    while True:
        value = json.loads(next_line())
        try:
            answer = _told(function(value))
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        tell(answer)


def _told(said: Any) -> dict[str, Any]:
    value, reason = said if isinstance(said, tuple) and len(said) == 2 else (said, None)
    if not isinstance(value, bool):
        value = float(value) if isinstance(value, int | float) else None
    return {"value": value, "reason": None if reason is None else str(reason), "shown": repr(said)[:SHOWN]}


def load_function(source: bytes | str, path: Path, name: str, attempted: str) -> Callable[..., Any]:
    """The function `name` of a file's text. Raises ConfigError when it is not there or the text does not run."""
    # Not by the import system, which would write its bytecode beside the user's file. It is registered all the same:
    # dataclasses look their module up.
    text = source if isinstance(source, bytes) else source.encode()
    digest = hashlib.sha256(str(path.absolute()).encode() + text).hexdigest()[:16]
    module = types.ModuleType(f"flywheel_file_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(attempted, f"{type(error).__name__}: {error}", "Correct the file.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(attempted, f"it has no function {name}", "Name one that is in the file.")
    return function  # type: ignore[no-any-return]
