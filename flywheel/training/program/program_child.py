"""The process of a program pool that runs the user's code: it loads the function or finds the command, and runs it
once for each request. Its watcher ends it (see `watcher.py`), and the pool what a run has left.

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
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from flywheel.records.program_run import RunResult
from flywheel.system.child_process import Channel, how_ended
from flywheel.system.process import end_with_parent
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.contract import (
    ContractError,
    Kind,
    RunError,
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

MARK: Final = "FLYWHEEL_AGENT_PROGRAM"
"""An environment variable of the processes that run the user's agent."""
GRACE_SECONDS: Final = 1.0
"""For threads that are ending when the run returns."""
CANCEL_SECONDS: Final = 5.0
PIPE_SECONDS: Final = 5.0
"""For the output of a command that has ended, which a process that it left may keep open."""
MAX_OUTPUT_BYTES: Final = 16_000_000
"""Of a command."""
MAX_ERROR: Final = 1_200


def main() -> None:
    """The process of the agent, until its connection ends."""
    os.environ[MARK] = "1"
    channel = Channel.to_parent()
    watcher, code = int(sys.argv.pop()), 1
    try:
        with contextlib.suppress(ImportError):  # an interpreter without ctypes
            end_with_parent()
        if _is_there(watcher):
            _serve(channel)
        print(f"its watcher, the process {watcher}, has ended or is in another PID namespace")
    except EOFError:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not the interpreter's own end, which would wait for threads of the user.
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _is_there(watcher: int) -> bool:
    """Whether the watcher has not ended before this process could ask to end with it. It need not be the parent,
    which may be a script that has started this interpreter: the watcher ends all that is below it."""
    try:
        os.kill(watcher, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # the script may have changed the user
    return True


def _serve(channel: Channel) -> NoReturn:
    def send(answer: Mapping[str, Any]) -> None:
        channel.send(json.dumps(answer, allow_nan=False).encode())

    runner = _Runner(_program_of(json.loads(channel.receive())))
    try:
        found = runner.load()
        agentjet = sys.modules.get("flywheel.training.program.agentjet")
        notes = getattr(agentjet, "notes", [])
        send({"found": found, "notes": notes, "is_math_equal": runner.is_math_equal, "pid": os.getpid()})
    except ContractError as error:
        send({"error": shortened(str(error))})
    while True:
        request = json.loads(channel.receive())
        models = {name: ModelEndpoint(**endpoint) for name, endpoint in request["models"].items()}
        result = runner.run(request["task"], models, request["trained"], request["answer"])
        runner.restore()
        send({"result": asdict(result), "spent": runner.spent, "helpers": _of_multiprocessing()})


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
    _workflow: Callable[..., Any] = lambda: None
    _judge: Callable[..., Any] | None = None
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
            self._workflow = functools.partial(_run_command, self.program.command)
        if self.program.reward_function:
            judge = load_function(self.program.reward_function, self.program)
            check_signature(judge, "judge")
            self.is_math_equal = getattr(judge, "is_math_equal", False)
            self._judge = None if self.is_math_equal else judge
        if self.program.setup:
            self._set_up(self.program.setup)
        specs = filter(None, (self.program.workflow, self.program.reward_function))
        self._folders = {self._folder, *map(folder_of, specs)}
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
        except RunError as error:
            result = RunResult(cause=error.cause, error=shortened(str(error)))
        except Exception as error:  # of making its models
            traceback.print_exc()
            result = RunResult(cause="raised", error=shortened(described(error)))
        self._cancel_tasks()
        deadline = time.monotonic() + GRACE_SECONDS
        while (threads := self._busy_threads()) and time.monotonic() < deadline:
            time.sleep(0.02)
        # A thread cannot be ended without its process.
        self.spent |= bool(threads)
        if threads and result.cause is None:
            why = left_running([*threads.values()], "thread", "threads")
            remedy = "End what it starts before it returns, or start it in rollout.setup"
            result = RunResult(cause="left_threads", error=f"{shortened(why)}. {remedy}")
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
        if self.program.workflow or self._judge is not None:  # a command needs no AgentScope
            given["model"] = chat_model(endpoint)
            given["auxiliary_models"] = {name: chat_model(other) for name, other in others.items()}
        returned = {"response": answer} if answer is not None else self._call(self._workflow, "workflow", given)
        returned_values.append(shown(returned))
        reward, response, metrics = _fields(returned, "workflow", needs_text=self.program.needs_response)
        given["response"] = response_of(returned)
        needs_response = self.program.needs_response or self._judge is not None
        if given["response"] is None and (needs_response or (self.is_math_equal and reward is None)):
            raise RunError("no_response", f"it returned no response, which a judge needs: {returned_values[0]}")
        if self._judge is not None:
            judged = self._call(self._judge, "judge", given)
            returned_values.append(f"reward function: {shown(judged)}")
            reward, _, further = _fields(judged, "judge")
            metrics |= further
        if reward is None and self.program.needs_reward and not self.is_math_equal:
            raise RunError("no_response", f"it returned no reward: {returned_values[-1]}")
        return RunResult(reward, response, metrics)

    def _call(self, function: Callable[..., Any], kind: Kind, given: Mapping[str, Any]) -> Any:
        returned, error = self._finish(function(**arguments_of(function, kind, given)))
        if os.getpid() != self._pid:
            os._exit(0)  # a process that the function has forked returned from it, too
        if isinstance(error, RunError):
            raise error
        if error is not None:
            where = "the reward function " if kind == "judge" else "it "
            traceback.print_exception(error)
            raise RunError("raised", f"{where}raised {described(error)}")
        return returned

    def _finish(self, awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
        """What it returned, or what it raised."""

        async def awaited() -> tuple[Any, BaseException | None]:
            # Caught here: the event loop does not survive a SystemExit.
            try:
                return await awaitable, None
            except BaseException as error:
                return None, error

        try:
            return self._loop.run_until_complete(awaited())
        except BaseException as error:
            # Of a task that the function has started, or of a signal: what was awaited has not ended.
            self.spent = True
            return None, error

    def _set_up(self, spec: str) -> None:
        function = load_function(spec)
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise ContractError(f"the setup function {spec} must have no required parameter: {error}") from None
        failure: BaseException | None = None
        try:
            # Outside of the event loop: it may call asyncio.run.
            returned = function()
        except BaseException as raised:
            failure = raised
        else:
            if inspect.isawaitable(returned):
                _, failure = self._finish(returned)
        if failure is not None:
            traceback.print_exception(failure)
            raise ContractError(f"the setup function {spec} raised {described(failure)}")

    def _cancel_tasks(self) -> None:
        async def cancelled() -> None:
            if tasks := asyncio.all_tasks() - self._kept_tasks - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                _, running = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
                self.spent |= bool(running)

        if not self.spent:
            self._finish(cancelled())

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


def _of_multiprocessing() -> list[int]:
    """The pids of its helpers, which it starts when they are first used, for the life of the interpreter."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    found = getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)
    return [pid for pid in found if pid is not None]


def _fields(
    returned: Any, kind: Kind, *, needs_text: bool = False
) -> tuple[float | None, str | None, dict[str, float]]:
    where = "the reward function: " if kind == "judge" else ""
    try:
        return fields_of(returned, kind, needs_text=needs_text)
    except RunError as error:
        raise RunError(error.cause, f"{where}{error}") from None
    except Exception as error:  # of a property of the user's object
        traceback.print_exc()
        raise RunError("raised", f"{where}reading what it returned raised {described(error)}") from None


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


def _codes(thread: threading.Thread) -> Iterator[CodeType]:
    """What a thread runs, the innermost function first, with the tasks of its event loop; and what a timer will, or a
    thread that has just been started."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame.f_code
        is_loop = frame.f_code.co_name == "run_forever"
        if is_loop and isinstance(loop := frame.f_locals.get("self"), asyncio.AbstractEventLoop):
            yield from _codes_of_tasks(loop)
        frame = frame.f_back
    for will_run in (getattr(thread, "function", None), getattr(thread, "_target", None)):
        function = will_run
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            yield code
        if isinstance(loop := getattr(function, "__self__", None), asyncio.AbstractEventLoop):
            yield from _codes_of_tasks(loop)


def _codes_of_tasks(loop: asyncio.AbstractEventLoop) -> Iterator[CodeType]:
    """What the tasks of another thread's event loop run, also of those that it was just asked to begin."""
    passed = threading.Event()
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(passed.set)
        passed.wait(GRACE_SECONDS)
    for task in asyncio.all_tasks(loop):
        awaited: Any = task.get_coro()
        while isinstance(code := getattr(awaited, "cr_code", None), CodeType):
            yield code
            awaited = awaited.cr_await


class _Command(asyncio.SubprocessProtocol):
    """What a command writes: its output up to the limit, and the end of its standard error, which goes to ours."""

    def __init__(self) -> None:
        self.output, self.errors = bytearray(), bytearray()
        self.ended, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            os.write(2, data)
            self.errors += data
            del self.errors[:-4_000]
        else:
            self.output += data
            if len(self.output) > MAX_OUTPUT_BYTES:
                self.ended.set()

    def process_exited(self) -> None:
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


async def _run_command(command: Sequence[str], task: Mapping[str, Any]) -> Any:
    """The object that the command writes for a task. Raises RunError."""
    try:
        # The `wait` of create_subprocess_exec would, in some versions, wait for pipes that a left process keeps open.
        transport, found = await asyncio.get_running_loop().subprocess_exec(_Command, *command)
    except OSError as error:
        raise RunError("raised", f"it did not start: {error}") from None
    try:
        given: Any = transport.get_pipe_transport(0)
        given.write(json.dumps(task).encode() + b"\n")  # a command need not read it
        given.close()
        await found.ended.wait()
        if len(found.output) > MAX_OUTPUT_BYTES:
            raise RunError("bad_output", f"it wrote more than {MAX_OUTPUT_BYTES:,} bytes to standard output")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(found.closed.wait(), PIPE_SECONDS)
    finally:
        transport.close()  # kills it if it is running
    if code := transport.get_returncode():
        how = f"ended with exit code {code}" if code > 0 else f"was ended by {how_ended(code)}"
        lines = [line.strip() for line in found.errors.decode(errors="replace").splitlines() if line.strip()]
        raise RunError("raised", f"it {how}{': ' if lines else ''}{' | '.join(lines[-5:])}")
    if not found.closed.is_set():
        raise RunError("left_processes", "a process that it started keeps its output open")
    return _object_of(bytes(found.output))


def _object_of(output: bytes) -> Any:
    if not output.strip():
        raise RunError("no_result", "it wrote nothing to standard output")
    try:
        found = json.loads(output)
        why = "" if isinstance(found, dict) else f"it is of type {type(found).__name__}"
    except (ValueError, RecursionError) as error:
        found, why = None, str(error)
    if why:
        start = output.strip()[:80].decode(errors="replace")
        raise RunError("bad_output", f"its output is not one JSON object ({why}); it begins with {start!r}")
    return found


def left_running(names: list[str], one: str = "process", several: str = "processes") -> str:
    number = f"a {one}" if len(names) == 1 else f"{len(names)} {several}"
    return f"it left {number} running: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def shortened(text: str) -> str:
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 1] + "…"
