"""The child process of a program pool: loads the user's function, runs it once for each request.

It is three processes. The last one runs the user's code and answers each line of JSON with one. The second one only
watches: everything that the last one starts stays its descendant (it is a "child subreaper", Linux), and when its
input ends, which is also how the parent's death is noticed, or when the last one ends, it kills all of them. The
first one stands in for it as the parent's child: Ray kills the children of an actor that ends, but not theirs.

It runs in the user's interpreter: only the standard library is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import IO, Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

from flywheel.records.program_run import FailureCause, RunResult
from flywheel.system.child_process import IGNORED, Channel
from flywheel.training.program import process_tree
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.contract import (
    ContractError,
    Kind,
    ResultError,
    arguments_of,
    chat_model,
    check_signature,
    described,
    fields_of,
    folder_of,
    is_installed,
    load_function,
    response_of,
    shown,
)
from flywheel.training.program.process_tree import Process

MARK: Final = "FLYWHEEL_AGENT_PROGRAM"
"""An environment variable of the processes that run the user's agent."""
END_SIGNAL: Final = signal.SIGUSR1
"""Ends the child, also if another process keeps its input open."""
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
GRACE_SECONDS: Final = 1.0
"""For processes and threads that are ending when the run returns."""
KILL_SECONDS: Final = 5.0
CANCEL_SECONDS: Final = 5.0
MAX_OUTPUT_BYTES: Final = 16_000_000
"""Of a command."""
MAX_ERROR: Final = 1_200

T = TypeVar("T")


def main() -> None:
    """The child process, until its input ends."""
    os.environ[MARK] = "1"
    channel = Channel.to_parent()
    first = os.getpid()
    if watcher := os.fork():
        _stand_in(watcher)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken = _wakeups()
    _prctl(PR_SET_PDEATHSIG, END_SIGNAL)
    watcher = os.getpid()
    if runner := os.fork():
        _watch(runner, channel.fileno(), woken, first)
    signal.set_wakeup_fd(-1)
    for number in (*IGNORED, signal.SIGCHLD, END_SIGNAL):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(woken)
    code = 1
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == watcher:
            _serve(channel)
    except EOFError:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not the interpreter's own end, which would wait for threads of the user.
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(ImportError, OSError, AttributeError):  # not Linux
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# The processes that run no code of the user.


def _wakeups() -> int:
    """A file descriptor from which signals that have come can be read. Those that a terminal or a service manager
    sends to all are ignored: the parent decides when the child ends."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    for number in (signal.SIGCHLD, END_SIGNAL):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken


def _received(woken: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(woken, 4096)
    return b""


def _stand_in(watcher: int) -> NoReturn:
    """Ends as the watching process does. It is told what that one is told by its parent."""
    parent = os.getppid()
    woken = _wakeups()
    waiting = select.poll()
    waiting.register(woken, select.POLLIN)
    ended: dict[int, int] = {}
    while watcher not in ended:
        waiting.poll(1000)
        # A process that was forked from the parent may keep the input open after the parent's death.
        if END_SIGNAL in _received(woken) or os.getppid() != parent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(watcher, END_SIGNAL)
        _reap(ended)
    _exit_with(ended[watcher])


def _watch(runner: int, requests: int, woken: int, parent: int) -> NoReturn:
    waiting = select.poll()
    waiting.register(requests, 0)  # only its end: the other process reads it
    waiting.register(woken, select.POLLIN)
    ended: dict[int, int] = {}
    while runner not in ended and os.getppid() == parent:
        ready = [number for number, _ in waiting.poll(1000)]
        if requests in ready or END_SIGNAL in _received(woken):
            break
        _reap(ended)
    _end_all(runner, ended)
    _exit_with(ended.get(runner, 0))


def _exit_with(code: int) -> NoReturn:
    """As a shell does: 128 plus the number of a signal, which is a negative code."""
    os._exit(128 - code if code < 0 else code)


def _reap(ended: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])


def _end_all(runner: int, ended: dict[int, int]) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        if runner not in ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(runner, signal.SIGKILL)
        process_tree.kill(found := process_tree.descendants(os.getpid()))
        _reap(ended)
        if not found and runner in ended:
            return
        time.sleep(0.01)


# The process that runs the user's code.


def _serve(channel: Channel) -> NoReturn:
    def send(answer: Mapping[str, Any]) -> None:
        channel.send(json.dumps(answer, allow_nan=False).encode())

    runner = _Runner(_program_of(json.loads(channel.receive())))
    try:
        found = runner.load()
        agentjet = sys.modules.get("flywheel.training.program.agentjet")
        send({"found": found, "notes": getattr(agentjet, "notes", []), "is_math_equal": runner.is_math_equal})
    except ContractError as error:
        send({"error": _shortened(str(error))})
    while True:
        request = json.loads(channel.receive())
        models = {name: ModelEndpoint(**endpoint) for name, endpoint in request["models"].items()}
        result = runner.run(request["task"], models, request["trained"], request["answer"])
        runner.restore()
        send({"result": asdict(result), "spent": runner.spent})


def _program_of(fields: Mapping[str, Any]) -> AgentProgram:
    """From `dataclasses.asdict`, as JSON."""
    models = {name: ModelEndpoint(**endpoint) for name, endpoint in fields["auxiliary_models"].items()}
    judge = ModelEndpoint(**fields["judge"]) if fields["judge"] is not None else None
    command = tuple(fields["command"])
    return AgentProgram(**{**fields, "command": command, "auxiliary_models": models, "judge": judge})


@dataclass
class _Runner:
    program: AgentProgram
    spent: bool = False
    """Whether a run left something that could not be ended: the next run needs a new process."""
    is_math_equal: bool = False
    """Whether the judge is the check `math-equal`, which the parent makes."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _workflow: Callable[..., Any] | None = None
    _judge: Callable[..., Any] | None = None
    _kept: set[tuple[int, int]] = field(default_factory=set)
    """Processes of the setup."""
    _kept_tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _kept_threads: set[threading.Thread] = field(default_factory=set)
    """Threads of the setup that run the user's code."""
    _folders: set[str] = field(default_factory=set)
    """Where the user's code is."""
    _folder: str = field(default_factory=os.getcwd)
    _restore: Callable[[], None] = lambda: None
    _pid: int = field(default_factory=os.getpid)
    _logger: logging.Logger = field(default_factory=lambda: logging.getLogger("workflow"))

    def load(self) -> str:
        """What it found, in one line. Raises ContractError."""
        asyncio.set_event_loop(self._loop)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._logger.addHandler(handler)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        if self.program.workflow:
            self._workflow = load_function(self.program.workflow, self.program)
            found = check_signature(self._workflow, "workflow")
            # The imports that it needs take seconds, which are no part of a run.
            try:
                chat_model(ModelEndpoint("http://127.0.0.1/v1", "model"))
            except Exception as error:
                traceback.print_exc()
                raise ContractError(f"no model of AgentScope can be made: {described(error)}") from None
        else:
            found = _checked_command(self.program.command)
        if self.program.reward_function:
            judge = load_function(self.program.reward_function, self.program)
            check_signature(judge, "judge")
            self.is_math_equal = getattr(judge, "is_math_equal", False)
            self._judge = None if self.is_math_equal else judge
        if self.program.setup:
            self._set_up(self.program.setup)
        specs = filter(None, (self.program.workflow, self.program.reward_function))
        self._folders = {self._folder, *map(folder_of, specs)}
        self._kept = {process.identity for process in self._new_processes()}
        os.chdir(self._folder)  # the setup may have changed it
        self._restore = _restorer()
        self._kept_tasks = asyncio.all_tasks(self._loop)
        self._kept_threads = set(self._busy_threads())
        return found

    def run(
        self, task: Mapping[str, Any], models: Mapping[str, ModelEndpoint], trained: str, answer: str | None
    ) -> RunResult:
        """`answer` is judged in place of the workflow's, which does not run then."""
        endpoint = models[trained]
        os.environ.update(_environment(endpoint))
        others = {**self.program.auxiliary_models, **(models if len(models) > 1 else {})}
        given = {
            "task": {
                **task,
                "openai": asdict(endpoint),
                "models": {name: asdict(model) for name, model in models.items()},
                "auxiliary_models": {name: asdict(model) for name, model in self.program.auxiliary_models.items()},
            },
            "logger": self._logger,
        }
        returned_values: list[str] = []
        try:
            result = self._result(given, endpoint, others, returned_values, answer)
        except _RunError as error:
            result = RunResult(cause=error.cause, error=_shortened(str(error)))
        except Exception as error:  # of making its models
            traceback.print_exc()
            result = RunResult(cause="raised", error=_shortened(described(error)))
        self._cancel_tasks()
        left, threads = self._end_left(), _after_grace(self._busy_threads)
        # A thread cannot be ended without its process.
        self.spent |= bool(threads)
        if left and result.cause is None:
            result = RunResult(cause="left_processes", error=_shortened(_left_running(left)))
        if threads and result.cause is None:
            why = _left_running([*threads.values()], "thread", "threads")
            remedy = "End what it starts before it returns, or start it in rollout.setup"
            result = RunResult(cause="left_threads", error=f"{_shortened(why)}. {remedy}")
        idle = {*threading.enumerate()} - {threading.current_thread(), *threads, *self._kept_threads}
        return replace(result, shown="; ".join(returned_values), idle_threads=sorted(each.name for each in idle))

    def restore(self) -> None:
        """Undo what a run has changed in environment variables, umask, `sys.path` and folder."""
        try:
            self._restore()
        except Exception:  # the folder is gone, for example
            self.spent = True
            traceback.print_exc()

    def _result(
        self,
        given: dict[str, Any],
        endpoint: ModelEndpoint,
        others: Mapping[str, ModelEndpoint],
        returned_values: list[str],
        answer: str | None,
    ) -> RunResult:
        if answer is not None:
            returned: Any = {"response": answer}
        elif self._workflow is None:
            returned = self._run_command(given["task"])
        else:
            given["model"] = chat_model(endpoint)
            given["auxiliary_models"] = {name: chat_model(other) for name, other in others.items()}
            returned = self._call(self._workflow, "workflow", given)
        returned_values.append(shown(returned))
        reward, response, metrics = _fields(returned, "workflow", needs_text=self.program.needs_response)
        given["response"] = response_of(returned)
        needs_response = self.program.needs_response or self._judge is not None
        if given["response"] is None and (needs_response or (self.is_math_equal and reward is None)):
            raise _RunError("no_response", f"it returned no response, which a judge needs: {returned_values[0]}")
        if self._judge is not None:
            if "auxiliary_models" not in given:
                given["auxiliary_models"] = {name: chat_model(other) for name, other in others.items()}
            judged = self._call(self._judge, "judge", given)
            returned_values.append(f"reward function: {shown(judged)}")
            reward, _, further = _fields(judged, "judge")
            metrics |= further
        if reward is None and self.program.needs_reward and not self.is_math_equal:
            raise _RunError("no_response", f"it returned no reward: {returned_values[-1]}")
        return RunResult(reward, response, metrics)

    def _call(self, function: Callable[..., Any], kind: Kind, given: Mapping[str, Any]) -> Any:
        async def called() -> Any:
            # Caught here: the event loop does not survive a SystemExit.
            try:
                return await function(**arguments_of(function, kind, given))
            except BaseException as error:
                failures.append(error)

        failures: list[BaseException] = []
        returned = self._finish(called(), failures)
        if os.getpid() != self._pid:
            os._exit(0)  # a process that the function has forked returned from it, too
        if failures:
            where = "the reward function " if kind == "judge" else "it "
            traceback.print_exception(failures[0])
            raise _RunError("raised", f"{where}raised {described(failures[0])}")
        return returned

    def _finish(self, coroutine: Coroutine[Any, Any, Any], failures: list[BaseException]) -> Any:
        try:
            return self._loop.run_until_complete(coroutine)
        except BaseException as error:
            # Of a task that the function has started, or of a signal: what was awaited has not ended.
            self.spent = True
            failures.append(error)
            return None

    def _run_command(self, task: Mapping[str, Any]) -> Any:
        try:
            process = subprocess.Popen(
                self.program.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise _RunError("raised", f"it did not start: {error}") from None
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = bytearray(), bytearray()
        text = json.dumps(task).encode() + b"\n"
        threads = [
            threading.Thread(target=work, args=arguments, daemon=True)
            for work, arguments in (
                (_write, (process.stdin, text)),
                (_read, (process, process.stdout, output)),
                (_forward, (process.stderr, errors)),
            )
        ]
        for thread in threads:
            thread.start()
        code = process.wait()
        # What it left may hold its output open.
        left = self._end_left()
        for thread in threads:
            thread.join(KILL_SECONDS)
            self.spent |= thread.is_alive()
        if len(output) > MAX_OUTPUT_BYTES:
            raise _RunError("bad_output", f"it wrote more than {MAX_OUTPUT_BYTES:,} bytes to standard output")
        if code:
            how = f"ended with exit code {code}" if code > 0 else f"was ended by {_signal(-code)}"
            lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
            raise _RunError("raised", f"it {how}{': ' if lines else ''}{' | '.join(lines[-5:])}")
        if left:
            raise _RunError("left_processes", _left_running(left))
        return _object_of(bytes(output))

    def _set_up(self, spec: str) -> None:
        function = load_function(spec)
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise ContractError(f"the setup function {spec} must have no required parameter: {error}") from None

        async def awaited(returned: Awaitable[Any]) -> None:
            try:
                await returned
            except BaseException as error:
                failures.append(error)

        failures: list[BaseException] = []
        try:
            # Outside of the event loop: it may call asyncio.run.
            returned = function()
        except BaseException as error:
            failures.append(error)
        else:
            if inspect.isawaitable(returned):
                self._finish(awaited(returned), failures)
        if failures:
            traceback.print_exception(failures[0])
            raise ContractError(f"the setup function {spec} raised {described(failures[0])}")

    def _cancel_tasks(self) -> None:
        async def cancelled() -> None:
            if tasks := asyncio.all_tasks() - self._kept_tasks - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                _, running = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
                self.spent |= bool(running)

        if not self.spent:
            self._finish(cancelled(), [])

    def _end_left(self) -> list[str]:
        """Kill what the run has started and left, after a while in which it can end by itself. Returns the names."""
        left = _after_grace(self._new_processes)
        names = [process.name for process in left]
        deadline = time.monotonic() + KILL_SECONDS
        while left and time.monotonic() < deadline:
            process_tree.kill(left)
            time.sleep(0.01)
            left = self._new_processes()
        self.spent |= bool(left)
        return names

    def _busy_threads(self) -> dict[threading.Thread, str]:
        """Threads, except those of the setup, that run the user's code or wait to run it, and where they are."""
        found: dict[threading.Thread, str] = {}
        for thread in {*threading.enumerate()} - {threading.current_thread()} - self._kept_threads:
            if code := next(filter(self._is_users, _codes(thread)), None):
                found[thread] = f"{thread.name} in {code.co_name} ({Path(code.co_filename).name})"
        return found

    def _is_users(self, code: CodeType) -> bool:
        """Whether its file is in the folder of the workflow or of the configuration, and of no installed package."""
        file = Path(code.co_filename)
        inside = (file.relative_to(folder) for folder in self._folders if file.is_relative_to(folder))
        return any(not is_installed(str(path)) for path in inside)

    def _new_processes(self) -> list[Process]:
        """What was started since the setup, except by processes of the setup."""
        # For the life of the interpreter; multiprocessing starts them when they are first used.
        tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
        server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
        of_multiprocessing = {getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)}
        children = process_tree.children_by_parent()
        found: list[Process] = []
        open_pids = [os.getppid()]
        while open_pids:
            for process in children.get(open_pids.pop(), []):
                if process.identity in self._kept or process.pid in of_multiprocessing:
                    continue
                open_pids.append(process.pid)
                if process.pid != os.getpid():
                    found.append(process)
        return found


class _RunError(Exception):
    def __init__(self, cause: FailureCause, message: str) -> None:
        self.cause = cause
        super().__init__(message)


def _fields(
    returned: Any, kind: Kind, *, needs_text: bool = False
) -> tuple[float | None, str | None, dict[str, float]]:
    where = "the reward function: " if kind == "judge" else ""
    try:
        return fields_of(returned, kind, needs_text=needs_text)
    except ResultError as error:
        raise _RunError(error.cause, f"{where}{error}") from None
    except Exception as error:  # of a property of the user's object
        traceback.print_exc()
        raise _RunError("raised", f"{where}reading what it returned raised {described(error)}") from None


def _checked_command(command: tuple[str, ...]) -> str:
    if not (found := shutil.which(command[0])):
        where = f"no file {Path(command[0]).absolute()}" if os.sep in command[0] else "no such program in PATH"
        raise ContractError(f"there is {where} that can be run: {command[0]}")
    return f"command {' '.join(command)} ({found})"


def _restorer() -> Callable[[], None]:
    """Sets environment variables, umask, `sys.path` and folder of the process to what they are now."""
    environment, path, folder = dict(os.environ), list(sys.path), Path.cwd()
    umask = os.umask(0o077)
    os.umask(umask)

    def restore() -> None:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.path[:] = path
        os.umask(umask)
        os.chdir(folder)

    return restore


def _environment(endpoint: ModelEndpoint) -> dict[str, str]:
    """The variables for an OpenAI client, also where a proxy is configured: the endpoint is reached without it."""
    without_proxy = {
        name: ",".join(filter(None, (os.environ.get(name), urlsplit(endpoint.base_url).hostname)))
        for name in ("NO_PROXY", "no_proxy")
        if urlsplit(endpoint.base_url).hostname not in os.environ.get(name, "").split(",")
    }
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        **without_proxy,
    }


def _after_grace(find: Callable[[], T]) -> T:
    """What is found after a while in which it can end by itself."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _codes(thread: threading.Thread) -> Iterator[CodeType]:
    """What a thread runs, the innermost function first, with the tasks of its event loop; and what a timer will."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame.f_code
        is_loop = frame.f_code.co_name == "run_forever"
        if is_loop and isinstance(loop := frame.f_locals.get("self"), asyncio.AbstractEventLoop):
            for task in asyncio.all_tasks(loop):
                awaited: Any = task.get_coro()
                while isinstance(code := getattr(awaited, "cr_code", None), CodeType):
                    yield code
                    awaited = awaited.cr_await
        frame = frame.f_back
    function = getattr(thread, "function", None)
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(code := getattr(function, "__code__", None), CodeType):
        yield code


def _left_running(names: list[str], one: str = "process", several: str = "processes") -> str:
    number = f"a {one}" if len(names) == 1 else f"{len(names)} {several}"
    return f"it left {number} running: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def _write(pipe: IO[bytes], text: bytes) -> None:
    with contextlib.suppress(OSError):  # a command need not read it
        pipe.write(text)
    with contextlib.suppress(OSError):
        pipe.close()


def _read(process: subprocess.Popen[bytes], pipe: IO[bytes], output: bytearray) -> None:
    while chunk := os.read(pipe.fileno(), 65_536):
        if len(output) <= MAX_OUTPUT_BYTES:
            output += chunk
        if len(output) > MAX_OUTPUT_BYTES:
            process.kill()
    pipe.close()


def _forward(pipe: IO[bytes], errors: bytearray) -> None:
    """To our own standard error; the last of it is kept."""
    while chunk := os.read(pipe.fileno(), 65_536):
        os.write(2, chunk)
        errors += chunk
        del errors[:-4_000]
    pipe.close()


def _object_of(output: bytes) -> Any:
    if not output.strip():
        raise _RunError("no_result", "it wrote nothing to standard output")
    try:
        found = json.loads(output)
        why = "" if isinstance(found, dict) else f"it is of type {type(found).__name__}"
    except (ValueError, RecursionError) as error:
        found, why = None, str(error)
    if why:
        start = output.strip()[:80].decode(errors="replace")
        raise _RunError("bad_output", f"its output is not one JSON object ({why}); it begins with {start!r}")
    return found


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 1] + "…"
