"""Runs the user's agent in child processes, each with one run at a time, a time limit and a memory limit.

A run that hangs, raises, uses too much memory or ends its process costs itself and its child, which is replaced. Each
child's first process kills everything below it when its input ends (see program_child.py), so neither a closed pool
nor a killed parent leaves anything behind.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import flywheel
from flywheel.errors import ConfigError
from flywheel.known_secrets import environment_without_secrets, redact_secrets
from flywheel.training.workflow import process_tree
from flywheel.training.workflow.agent_program import AgentProgram, FailureCause, ModelEndpoint, RunResult
from flywheel.training.workflow.process_tree import Process
from flywheel.training.workflow.program_child import END_SIGNAL

START_SECONDS: Final = 600.0
"""Longest start of a child: it loads the user's modules and runs the setup."""
END_SECONDS: Final = 10.0
"""After which a child whose input has ended is killed."""
SLICE_SECONDS: Final = 0.1
"""How often a wait looks whether it is cancelled."""
LOOK_SECONDS: Final = 0.25
"""How often the memory of the children is looked at."""

_BOOTSTRAP: Final = """\
import sys
sys.path[:] = [path for path in sys.path if path]
if sys.version_info < (3, 10):
    print('{{"error": "its interpreter is Python %d.%d; at least 3.10 is needed"}}' % sys.version_info[:2])
    sys.exit()
import importlib.util
spec = importlib.util.spec_from_file_location("flywheel", {init!r}, submodule_search_locations=[{folder!r}])
package = sys.modules["flywheel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from flywheel.training.workflow.program_child import main
main()
"""
"""Imports no module of the current directory, and of our environment only this package: the interpreter may be
another one, with packages of its own."""


class _RunEndedError(Exception):
    """A child had to be ended, or ended itself."""

    def __init__(self, cause: FailureCause, message: str) -> None:
        self.cause = cause
        super().__init__(message)


class _StartError(Exception):
    """A child did not start, or its program does not load; the text is for the user."""


class _Memory:
    """Resident memory of trees of processes, from one look at all processes for all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = -1.0
        self._children: Mapping[int, list[Process]] = {}

    def of(self, root: int, *, limit: int, now: bool) -> int:
        """Bytes of what runs in the child `root`, now or at most LOOK_SECONDS ago. Shared pages count once if it
        would be above the limit otherwise."""
        with self._lock:
            if now or root not in self._children or time.monotonic() - self._looked >= LOOK_SECONDS:
                self._children = process_tree.children_by_parent()
                self._looked = time.monotonic()
            # Without the one that watches: all its memory is shared with the one that runs the user's code.
            watching = self._children.get(root, [])
            found = [each for one in watching for each in process_tree.descendants(one.pid, self._children)]
        resident = sum(process.resident_bytes for process in found)
        return resident if resident <= limit else sum(map(process_tree.shared_evenly, found))


class _Child:
    """A process of program_child.py. One request at a time."""

    def __init__(self, program: AgentProgram, memory: _Memory) -> None:
        folder = Path(flywheel.__file__).parent
        code = _BOOTSTRAP.format(init=str(folder / "__init__.py"), folder=str(folder))
        try:
            self._process = subprocess.Popen(
                [program.python or sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=program.folder or None,
                env={**environment_without_secrets(), **program.environment},
                # Of its own: Ctrl-C is meant for the parent.
                process_group=0,
                bufsize=0,
            )
        except OSError as error:
            raise _StartError(f"its process does not start: {error}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._memory = memory
        self._limit = program.memory_bytes
        self.peak_bytes = 0
        """Largest resident memory during the last request."""
        self.resident_bytes = 0
        self.resident_at_start = 0

    def ask(self, request: bytes, seconds: float, stopped: Callable[[], bool]) -> Any:
        """The answer to one line of JSON. Raises _RunEndedError, after which this child can only be ended."""
        data = memoryview(request)
        answer = bytearray()
        begin = looked = time.monotonic()
        self.peak_bytes = 0
        waiting = select.poll()
        waiting.register(self._output, select.POLLIN)
        waiting.register(self._input, select.POLLOUT)
        while not answer.endswith(b"\n"):
            ready = dict(waiting.poll(SLICE_SECONDS * 1000))
            if ready.get(self._input, 0):
                with contextlib.suppress(BlockingIOError, BrokenPipeError):  # reading then finds the end
                    data = data[os.write(self._input, data[:65_536]) :]
                if not data or ready[self._input] & select.POLLERR:
                    waiting.unregister(self._input)
            if ready.get(self._output, 0):
                chunk = os.read(self._output, 1 << 20)
                if not chunk:
                    raise _RunEndedError("ended", f"its process ended ({self._how_ended()})")
                answer += chunk
            if stopped():
                raise _RunEndedError("ended", "it was cancelled")
            now = time.monotonic()
            if now - begin > seconds and not answer:
                raise _RunEndedError("timeout", f"it ran longer than {seconds:g} s")
            if now - looked >= LOOK_SECONDS:
                looked = now
                self._look(now=False)
                if self.resident_bytes > self._limit:
                    why = f"it used {self.resident_bytes / 1e9:.2f} GB; the limit is {self._limit / 1e9:g} GB"
                    raise _RunEndedError("memory", why)
        self._look(now=True)
        return json.loads(answer)

    def _look(self, *, now: bool) -> None:
        self.resident_bytes = self._memory.of(self._process.pid, limit=self._limit, now=now)
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def end(self) -> None:
        """End the process and everything below it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(END_SIGNAL)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            below = process_tree.descendants(self._process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            process_tree.kill(below)
            self._process.wait()

    def _how_ended(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its streams"
        if code <= 128:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return signal.Signals(code - 128).name
        return f"exit code {code}"


@dataclass
class _Job:
    request: bytes
    seconds: float
    future: concurrent.futures.Future[RunResult] = field(default_factory=concurrent.futures.Future)
    cancelled: threading.Event = field(default_factory=threading.Event)


class _Workers:
    """The threads of a pool, one for each child that runs something. They do not keep the pool alive."""

    def __init__(self, program: AgentProgram, most: int) -> None:
        self._program = program
        self._most = most
        self._memory = _Memory()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open_jobs = 0
        self._threads: list[threading.Thread] = []
        self._idle: list[_Child] = []
        self._closed = threading.Event()

    def start(self) -> str:
        child, found = self._new_child()
        self._give_back(child)
        return found

    def submit(self, job: _Job) -> None:
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError("the pool is closed")
            self._open_jobs += 1
            if self._open_jobs > len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name="agent program", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put(job)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            threads, children = self._threads, self._idle
            self._threads, self._idle = [], []
            for _ in threads:
                self._jobs.put(None)
        for child in children:
            child.end()
        for thread in threads:
            thread.join(2 * END_SECONDS)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.future.set_running_or_notify_cancel():
                    job.future.set_result(self._run(job))
            except BaseException as error:
                job.future.set_exception(error)
            finally:
                with self._lock:
                    self._open_jobs -= 1

    def _run(self, job: _Job) -> RunResult:
        def stopped() -> bool:
            return job.cancelled.is_set() or self._closed.is_set()

        if stopped():
            return RunResult(cause="ended", error="it was cancelled")
        try:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            child = child or self._new_child(stopped)[0]
        except _StartError as error:
            return RunResult(cause="raised", error=str(error))
        begin = time.monotonic()
        try:
            answer = child.ask(job.request, job.seconds, stopped)
        except _RunEndedError as error:
            child.end()
            result = RunResult(cause=error.cause, error=str(error))
        except BaseException:
            child.end()
            raise
        else:
            result = RunResult(**answer["result"])
            if answer["spent"] or self._has_grown(child):
                child.end()
            else:
                self._give_back(child)
        return replace(
            result,
            error=redact_secrets(result.error),
            shown=redact_secrets(result.shown),
            seconds=time.monotonic() - begin,
            peak_bytes=child.peak_bytes,
        )

    def _has_grown(self, child: _Child) -> bool:
        """Whether runs have left so much memory in use that the next one could reach the limit without its fault."""
        free_at_start = self._program.memory_bytes - child.resident_at_start
        return child.resident_bytes - child.resident_at_start > free_at_start / 2

    def _new_child(self, stopped: Callable[[], bool] | None = None) -> tuple[_Child, str]:
        child = _Child(self._program, self._memory)
        try:
            fields = {**asdict(self._program), "command": list(self._program.command)}
            answer = child.ask(_line(fields), START_SECONDS, stopped or self._closed.is_set)
            child.resident_at_start = child.resident_bytes
        except _RunEndedError as error:
            child.end()
            raise _StartError(f"while it was loaded, {error}") from None
        except BaseException:
            child.end()
            raise
        if "error" in answer:
            child.end()
            raise _StartError(redact_secrets(answer["error"]))
        return child, answer["found"]

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._idle.append(child)
                return
        child.end()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


class ProgramPool:
    """The user's program in up to `workers` child processes. Thread-safe; closed at exit as well."""

    def __init__(self, program: AgentProgram, *, workers: int) -> None:
        self._program = program
        self._workers = _Workers(program, workers)
        self._close = weakref.finalize(self, self._workers.close)

    def start(self) -> str:
        """Start one child, load the program and check the contract. Returns what was found, in one line. Raises
        ConfigError."""
        try:
            return self._workers.start()
        except _StartError as error:
            what = f"load the workflow {self._program.name}" if self._program.workflow else "start the command"
            raise ConfigError(what, str(error), "Correct it and start again.") from None

    async def run(
        self,
        task: Mapping[str, Any],
        models: Mapping[str, ModelEndpoint],
        trained: str,
        *,
        seconds: float | None = None,
    ) -> RunResult:
        """Run the program once. Failures of the run are in the result.

        `models` are those of the policy by target; `trained` is the one that becomes the `model` argument. `seconds`
        replaces the program's time limit. The wait for a free child is not part of it. Cancelling kills the run.
        """
        request: dict[str, Any] = {
            "task": dict(task),
            "models": {name: asdict(endpoint) for name, endpoint in models.items()},
            "trained": trained,
        }
        job = _Job(_line(request), self._program.seconds if seconds is None else seconds)
        self._workers.submit(job)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.cancelled.set()
            raise

    def close(self) -> None:
        """End all children and what they have started."""
        self._close()
