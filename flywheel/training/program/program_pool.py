"""Runs the user's agent in child processes, each with one run at a time, a time limit and a memory limit.

A run that hangs, raises, uses too much memory or ends its process costs itself and its child, which is replaced. What
a run has started and left is ended after it. Nothing outlives a closed pool or a killed parent: see `watcher.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import psutil

import flywheel
from flywheel.config.agentjet import with_defaults
from flywheel.config.file import Config
from flywheel.config.judge import JudgeSettings
from flywheel.config.training import AgentProgramSettings, RewardSettings
from flywheel.errors import CheckError, ConfigError
from flywheel.judge.client import endpoints_of
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.checks.math_equal import MathEqual
from flywheel.records.program_run import RunResult
from flywheel.records.verdict import Exchange
from flywheel.secrets import environment_without_secrets, is_sendable, redact_secrets, whole_url
from flywheel.serving.server.vllm_command import base_name
from flywheel.system.child_process import ChildEndedError, ChildPool, ChildProcess
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.contract import RunError
from flywheel.training.program.program_child import left_running, shortened
from flywheel.training.program.watcher import ForkServer, end_all, name_of, resident_bytes

START_SECONDS: Final = 600.0
"""Longest start of a watcher, and then of a child: it loads the user's modules and runs the setup."""
LOOK_SECONDS: Final = 0.25
"""How often the memory of the children is looked at."""
END_SECONDS: Final = 10.0
"""After which a watcher that was told to end is killed with all that is below it."""
GRACE_SECONDS: Final = 1.0
"""For processes that are ending when a run returns."""

_BOOTSTRAP: Final = """\
import sys
sys.path[:] = [path for path in sys.path if path]
if sys.version_info < (3, 10):
    import os
    message = b'{{"error": "its interpreter is Python %d.%d; at least 3.10 is needed"}}' % sys.version_info[:2]
    os.write(int(sys.argv[2]), os.read(int(sys.argv[2]), 16) + len(message).to_bytes(8, "big") + message)
    sys.exit()
import importlib.util
spec = importlib.util.spec_from_file_location("flywheel", {init!r}, submodule_search_locations=[{folder!r}])
package = sys.modules["flywheel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from flywheel.training.program.program_child import main
main()
"""
"""Imports no module of the current directory, and of our environment only this package: the interpreter may be
another one, with packages of its own."""


class _Child(ChildProcess):
    """A process of program_child.py, below its watcher."""

    def __init__(self, program: AgentProgram, server: ForkServer) -> None:
        """Raises OSError."""
        with self._connected() as channel:
            self._watcher = server.start(channel)
        self._lines = self._watcher.makefile()
        self._watcher.settimeout(START_SECONDS)
        try:
            found = self._said("it ended")
        except TimeoutError:
            found = f"its watcher does not answer within {START_SECONDS:g} s"
        if isinstance(found, str):
            self._close()
            raise OSError(found)
        self._pid: int = found
        self._server = server
        self._limit = program.memory_bytes
        self._code: int | None = None
        self._kept: set[psutil.Process] = set()
        """Processes of the setup."""
        self.urls: set[str] = set()
        """Where its runs found their models."""
        self.loaded: Mapping[str, Any] = {}
        """What it found: `found` in one line, `notes` for users, whether its judge `is_math_equal`, and its `pid`."""
        self.peak_bytes = 0
        """Largest resident memory during the last request."""
        self.resident_bytes = 0
        self.resident_at_start = 0

    def load(self, program: AgentProgram, stopped: Callable[[], bool]) -> Any:
        """What it found, or an `error`. Raises RunError, after which this child has ended."""
        self.loaded = self.answer(asdict(program), START_SECONDS, stopped)
        self.resident_at_start = self.resident_bytes
        self._kept = set(self._server.below(self.pid))
        return self.loaded

    def answer(self, request: Mapping[str, Any], seconds: float, stopped: Callable[[], bool]) -> Any:
        """The answer to a request. Raises RunError, after which this child has ended."""
        looked = time.monotonic()
        self.peak_bytes = 0

        def watch() -> None:
            nonlocal looked
            if stopped():
                raise RunError("ended", "it was cancelled")
            if time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                self._look(LOOK_SECONDS)
                if self.resident_bytes > self._limit:
                    why = f"it used {self.resident_bytes / 1e9:.2f} GB; the limit is {self._limit / 1e9:g} GB"
                    raise RunError("memory", why)

        try:
            answer = json.loads(self.ask(json.dumps(request).encode(), seconds, watch))
        except TimeoutError:
            raise RunError("timeout", f"it ran longer than {seconds:g} s") from None
        except ChildEndedError as error:
            raise RunError("ended", f"its process ended ({error})") from None
        self._look()
        return answer

    def _look(self, age: float = 0.0) -> None:
        self.resident_bytes = resident_bytes(self._server.below(self.pid, age=age), self._limit)
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def end_left(self, helpers: Collection[int]) -> list[str]:
        """End what the last run has started and left, except these processes, after a while in which it can end by
        itself. Returns the command lines. If something does not end, this child is ended."""
        deadline = time.monotonic() + GRACE_SECONDS
        left = self._left(helpers, LOOK_SECONDS)  # they were looked at when it answered
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = self._left(helpers)
        names = [name_of(process) for process in left]
        if left and not end_all(lambda: self._left(helpers)):
            self.end()
        return names

    def _left(self, helpers: Collection[int], age: float = 0.0) -> list[psutil.Process]:
        """What was started since the setup, except by these processes and those of the setup."""
        kept = set(helpers)
        left = []
        for process in self._server.below(self.pid, age=age):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid == self.loaded["pid"] or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process in self._kept or not kept.isdisjoint((process.pid, process.ppid())):
                    kept.add(process.pid)
                else:
                    left.append(process)
        return left

    @property
    def has_grown(self) -> bool:
        """Whether runs have left so much memory in use that the next one could reach the limit without its fault."""
        return self.resident_bytes - self.resident_at_start > (self._limit - self.resident_at_start) / 2

    @property
    def pid(self) -> int:
        """Of its watcher."""
        return self._pid

    @property
    def has_ended(self) -> bool:
        return self._code is not None

    def kill(self) -> None:
        # Also if a forked process keeps the connection open.
        with contextlib.suppress(OSError):
            self._watcher.shutdown(socket.SHUT_WR)

    def end(self) -> int:
        if self._code is None:
            self.kill()
            self._watcher.settimeout(END_SECONDS)
            try:
                self._code = int(self._said(-signal.SIGKILL))
            except TimeoutError:  # it was stopped, for example
                self._code = -signal.SIGKILL
                whole = [*self._server.below(self.pid), psutil.Process(self.pid)]
                end_all(lambda: [each for each in whole if each.is_running()])
            self._close()
        return self._code

    def _said(self, otherwise: Any) -> Any:
        """What the watcher says next; `otherwise` if it has ended."""
        line = self._lines.readline()
        return json.loads(line) if line else otherwise

    def _close(self) -> None:
        for each in (self._lines, self._watcher, self._channel):
            each.close()


class ProgramPool:
    """The user's program in up to `workers` child processes. Thread-safe; closed at exit as well."""

    def __init__(
        self, program: AgentProgram, *, workers: int, was_called_late: Callable[[str], bool] = lambda _: False
    ) -> None:
        """`was_called_late` says of a base URL of a run whether it was called after the run's end."""
        self._program = program
        self._was_called_late = was_called_late
        package = Path(flywheel.__file__)
        code = _BOOTSTRAP.format(init=str(package), folder=str(package.parent))
        environment = {**environment_without_secrets(), **program.environment}
        command = [program.python or sys.executable, "-c", code]
        self._server = ForkServer(command, environment, program.folder or None)
        self._children: ChildPool[_Child] = ChildPool(workers)
        self._threads = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="agent program")
        self._closed = threading.Event()
        self.notes: list[str] = []
        """What users should know about the program once it has started, in sentences."""
        self._close = weakref.finalize(self, _close, self._closed, self._threads, self._children, self._server)

    def start(self) -> str:
        """Start one child, load the program and check the contract. Returns what was found, in one line. Raises
        ConfigError."""
        try:
            with self._children.child(lambda: self._new_child(self._closed.is_set)) as child:
                self.notes = child.loaded["notes"]
                return str(child.loaded["found"])
        except RunError as error:
            what = f"load the workflow {self._program.name}" if self._program.workflow else "start the command"
            raise ConfigError(what, redact_secrets(str(error)), "Correct it and start again.") from None

    async def run(
        self,
        task: Mapping[str, Any],
        models: Mapping[str, ModelEndpoint],
        trained: str,
        *,
        seconds: float | None = None,
        answer: str | None = None,
    ) -> RunResult:
        """Run the program once. Failures of the run are in the result.

        `models` are those of the policy by target; `trained` is the one that becomes the `model` argument. `seconds`
        replaces the program's time limit. The wait for a free child is not part of it. Cancelling kills the run.
        With an `answer`, only the reward function runs, on that answer.
        """
        request: dict[str, Any] = {
            "task": dict(task),
            "models": {name: asdict(endpoint) for name, endpoint in models.items()},
            "trained": trained,
            "answer": answer,
        }
        cancelled = threading.Event()
        limit = self._program.seconds if seconds is None else seconds
        run = self._threads.submit(self._run, request, limit, lambda: cancelled.is_set() or self._closed.is_set())
        try:
            return await asyncio.wrap_future(run)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def _run(self, request: Mapping[str, Any], seconds: float, stopped: Callable[[], bool]) -> RunResult:
        if stopped():
            return RunResult(cause="ended", error="it was cancelled")
        late: list[_Child] = []

        def is_usable(child: _Child) -> bool:
            if any(map(self._was_called_late, child.urls)):
                late.append(child)
            return child not in late

        peak, begin = 0, time.monotonic()
        try:
            with self._children.child(lambda: self._new_child(stopped), is_usable) as child:
                child.urls |= {each["base_url"] for each in request["models"].values()}
                begin = time.monotonic()
                try:
                    result = self._answer(child, request, seconds, stopped)
                finally:
                    peak = child.peak_bytes
        except RunError as error:
            result = RunResult(cause=error.cause, error=str(error))
        return replace(
            result,
            error=redact_secrets(result.error),
            shown=redact_secrets(result.shown),
            seconds=time.monotonic() - begin,
            peak_bytes=peak,
            late_calls=len(late),
        )

    def _answer(
        self, child: _Child, request: Mapping[str, Any], seconds: float, stopped: Callable[[], bool]
    ) -> RunResult:
        answer = child.answer(request, seconds, stopped)
        result = RunResult(**answer["result"])
        if left := child.end_left(answer["helpers"]):
            result = _failed_by(left, result)
        if child.loaded["is_math_equal"] and result.cause is None and result.reward is None:
            result = _checked(result, request["task"])
        if answer["spent"] or child.has_grown or self._program.isolation == "run":
            child.end()
        return result

    def _new_child(self, stopped: Callable[[], bool]) -> _Child:
        """Raises RunError."""
        try:
            child = _Child(self._program, self._server)
            answer = child.load(self._program, stopped)
        except OSError as error:
            raise RunError("raised", f"its process does not start: {error}") from None
        except RunError as error:
            raise RunError("raised", f"while it was loaded, {error}") from None
        if "error" in answer:
            child.end()
            raise RunError("raised", answer["error"])
        return child

    def close(self) -> None:
        """End all children and what they have started."""
        self._close()


def _close(
    closed: threading.Event,
    threads: concurrent.futures.ThreadPoolExecutor,
    children: ChildPool[_Child],
    server: ForkServer,
) -> None:
    closed.set()
    children.close()
    threads.shutdown()
    server.close()


def _failed_by(left: list[str], result: RunResult) -> RunResult:
    """The result of a run that left processes, which threads of it may have waited for."""
    if result.cause not in (None, "left_threads", "left_processes"):
        return result
    failed = RunResult(cause="left_processes", error=shortened(left_running(left)))
    return replace(failed, shown=result.shown, idle_threads=result.idle_threads)


def _checked(result: RunResult, task: Mapping[str, Any]) -> RunResult:
    """The result with the reward of AgentJet's judge of boxed results, as the check `math-equal` decides it."""
    # The answers of a data set such as GSM8K end with it.
    right = str(task["metadata"].get("answer") or "").split("####")[-1].strip()
    exchange = Exchange(task["main_query"], result.response or "", line={"metadata": {"reference": right}})
    try:
        is_equal = bool(right) and check(MathEqual(id="reward_function"), exchange).passed
    except CheckError as error:
        return replace(result, cause="raised", error=str(error))
    return replace(result, reward=float(is_equal), metrics={**result.metrics, "is_success": float(is_equal)})


def decided_reward(run: RunResult) -> tuple[RewardSettings, str]:
    """Which reward counts where no setting says so, by a run that did not fail, and a sentence about it; no sentence
    where there was no choice."""
    if run.reward is None:
        return RewardSettings(), ""
    if run.response is None:
        why = "the agent returns a reward and no response: its reward alone counts, and the rubric is not asked"
        return RewardSettings(rubric=0, workflow=1), why
    why = "the agent returns a response and a reward: the rubric's score counts, and rollout.reward.workflow is 0"
    return RewardSettings(), why


def program_of(config: Config) -> AgentProgram | None:
    """The program of `rollout.agent`; None if rollouts run none. Raises ConfigError for an auxiliary model whose
    variable has no key, and for a variable of `rollout.agent_environment` that is not set."""
    rollout = config.rollout
    agent = rollout.agent
    if not isinstance(agent, AgentProgramSettings):
        return None
    program = AgentProgram(
        workflow=agent.workflow or "",
        command=tuple(agent.command or ()),
        python=str(agent.python or ""),
        reward_function=rollout.reward_function or "",
        setup=rollout.setup or "",
        folder=str(agent.folder),
        isolation=agent.isolation,
        seconds=rollout.agent_timeout_seconds,
        memory_bytes=round(rollout.agent_memory_gb * 1e9),
        auxiliary_models={
            name: ModelEndpoint(whole_url(model.base_url), model.model, **_key(name, model.api_key_env))
            for name, model in rollout.auxiliary_models.items()
        },
        models=dict.fromkeys((base_name(config.model.base), *config.aliases), "policy") | rollout.models,
        environment={
            name: _variable(name, "run the user's agent", "Set it, or take it out of rollout.agent_environment.")
            for name in rollout.agent_environment
        },
        needs_response=rollout.reward is not None and rollout.reward.rubric > 0,
        needs_reward=rollout.reward is not None and rollout.reward.workflow > 0,
    )
    if not program.is_of_agentjet:
        return program
    return replace(program, config=with_defaults(agent.config), judge=_judge(config.judge))


def _judge(settings: JudgeSettings) -> ModelEndpoint:
    """Without its key, calls of it fail; not all judges make any."""
    judge = endpoints_of(settings)[0]
    return ModelEndpoint(
        whole_url(judge.base_url), judge.model, os.environ.get(judge.api_key_env, "").strip() or "unused"
    )


def _key(name: str, variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    attempted, setting = f"use rollout.auxiliary_models.{name}", f"rollout.auxiliary_models.{name}.api_key_env"
    key = _variable(variable, attempted, f"Set it, or name another one in {setting}.").strip()
    if not key or not is_sendable(key):
        why = f"the key in the environment variable {variable} is empty or contains characters that no key has"
        raise ConfigError(attempted, why, f"Correct it, or name another one in {setting}.")
    return {"api_key": key}


def _variable(name: str, attempted: str, hint: str) -> str:
    if (value := os.environ.get(name)) is None:
        raise ConfigError(attempted, f"the environment variable {name} is not set", hint)
    return value
