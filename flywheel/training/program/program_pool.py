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
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import flywheel
from flywheel.config.agentjet import with_defaults
from flywheel.config.file import Config
from flywheel.config.judge import JudgeSettings
from flywheel.config.training import AgentProgramSettings, RewardSettings
from flywheel.errors import CheckError, ConfigError
from flywheel.judge.client import endpoints_of
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.checks.math_equal import MathEqual
from flywheel.records.program_run import FailureCause, RunResult
from flywheel.records.verdict import Exchange
from flywheel.secrets import environment_without_secrets, is_sendable, redact_secrets, whole_url
from flywheel.serving.server.vllm_command import base_name
from flywheel.system.child_process import ChildEndedError, ChildPool, ChildProcess
from flywheel.training.program import process_tree
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.process_tree import Process
from flywheel.training.program.program_child import END_SIGNAL

START_SECONDS: Final = 600.0
"""Longest start of a child: it loads the user's modules and runs the setup."""
END_SECONDS: Final = 10.0
"""After which a child whose input has ended is killed."""
LOOK_SECONDS: Final = 0.25
"""How often the memory of the children is looked at."""

_BOOTSTRAP: Final = """\
import sys
sys.path[:] = [path for path in sys.path if path]
if sys.version_info < (3, 10):
    import os
    message = b'{{"error": "its interpreter is Python %d.%d; at least 3.10 is needed"}}' % sys.version_info[:2]
    os.write(int(sys.argv[1]), os.read(int(sys.argv[1]), 16) + len(message).to_bytes(8, "big") + message)
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


class _Child(ChildProcess):
    """A process of program_child.py."""

    def __init__(self, program: AgentProgram, memory: _Memory) -> None:
        folder = Path(flywheel.__file__).parent
        code = _BOOTSTRAP.format(init=str(folder / "__init__.py"), folder=str(folder))
        environment = {**environment_without_secrets(), **program.environment}
        super().__init__([program.python or sys.executable, "-c", code], environment, program.folder or None)
        self._memory = memory
        self._limit = program.memory_bytes
        self.urls: set[str] = set()
        """Where its runs found their models."""
        self.loaded: Mapping[str, Any] = {}
        """What it found: `found` in one line, `notes` for users, and whether its judge `is_math_equal`."""
        self.peak_bytes = 0
        """Largest resident memory during the last request."""
        self.resident_bytes = 0
        self.resident_at_start = 0

    def answer(self, request: Mapping[str, Any], seconds: float, stopped: Callable[[], bool]) -> Any:
        """The answer to a request. Raises _RunEndedError, after which this child has ended."""
        looked = time.monotonic()
        self.peak_bytes = 0

        def watch() -> None:
            nonlocal looked
            if stopped():
                raise _RunEndedError("ended", "it was cancelled")
            if time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                self._look(now=False)
                if self.resident_bytes > self._limit:
                    why = f"it used {self.resident_bytes / 1e9:.2f} GB; the limit is {self._limit / 1e9:g} GB"
                    raise _RunEndedError("memory", why)

        try:
            answer = json.loads(self.ask(json.dumps(request).encode(), seconds, watch))
        except TimeoutError:
            raise _RunEndedError("timeout", f"it ran longer than {seconds:g} s") from None
        except ChildEndedError as error:
            raise _RunEndedError("ended", f"its process ended ({error})") from None
        self._look(now=True)
        return answer

    def _look(self, *, now: bool) -> None:
        self.resident_bytes = self._memory.of(self.pid, limit=self._limit, now=now)
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    @property
    def has_grown(self) -> bool:
        """Whether runs have left so much memory in use that the next one could reach the limit without its fault."""
        return self.resident_bytes - self.resident_at_start > (self._limit - self.resident_at_start) / 2

    def kill(self) -> None:
        """End the process and everything below it."""
        if self.has_ended:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(END_SIGNAL)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            below = process_tree.descendants(self.pid)
            super().kill()
            process_tree.kill(below)


class ProgramPool:
    """The user's program in up to `workers` child processes. Thread-safe; closed at exit as well."""

    def __init__(
        self, program: AgentProgram, *, workers: int, was_called_late: Callable[[str], bool] = lambda _: False
    ) -> None:
        """`was_called_late` says of a base URL of a run whether it was called after the run's end."""
        self._program = program
        self._was_called_late = was_called_late
        self._memory = _Memory()
        self._children: ChildPool[_Child] = ChildPool(workers)
        self._threads = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="agent program")
        self._closed = threading.Event()
        self.notes: list[str] = []
        """What users should know about the program once it has started, in sentences."""
        self._close = weakref.finalize(self, _close, self._closed, self._threads, self._children)

    def start(self) -> str:
        """Start one child, load the program and check the contract. Returns what was found, in one line. Raises
        ConfigError."""
        try:
            with self._children.child(lambda: self._new_child(self._closed.is_set)) as child:
                self.notes = child.loaded["notes"]
                return str(child.loaded["found"])
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

        try:
            with self._children.child(lambda: self._new_child(stopped), is_usable) as child:
                child.urls |= {each["base_url"] for each in request["models"].values()}
                begin = time.monotonic()
                try:
                    answer = child.answer(request, seconds, stopped)
                    result = RunResult(**answer["result"])
                    if child.loaded["is_math_equal"] and result.cause is None and result.reward is None:
                        result = _checked(result, request["task"])
                    if answer["spent"] or child.has_grown or self._program.isolation == "run":
                        child.end()
                except _RunEndedError as error:
                    result = RunResult(cause=error.cause, error=str(error))
        except _StartError as error:
            return RunResult(cause="raised", error=str(error))
        return replace(
            result,
            error=redact_secrets(result.error),
            shown=redact_secrets(result.shown),
            seconds=time.monotonic() - begin,
            peak_bytes=child.peak_bytes,
            late_calls=len(late),
        )

    def _new_child(self, stopped: Callable[[], bool]) -> _Child:
        try:
            child = _Child(self._program, self._memory)
        except OSError as error:
            raise _StartError(f"its process does not start: {error}") from None
        try:
            answer = child.answer(asdict(self._program), START_SECONDS, stopped)
        except _RunEndedError as error:
            raise _StartError(f"while it was loaded, {error}") from None
        if "error" in answer:
            child.end()
            raise _StartError(redact_secrets(answer["error"]))
        child.loaded, child.resident_at_start = answer, child.resident_bytes
        return child

    def close(self) -> None:
        """End all children and what they have started."""
        self._close()


def _close(
    closed: threading.Event, threads: concurrent.futures.ThreadPoolExecutor, children: ChildPool[_Child]
) -> None:
    closed.set()
    children.close()
    threads.shutdown()


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
        environment={name: _variable(name) for name in rollout.agent_environment},
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
    key = os.environ.get(variable, "").strip()
    if not key or not is_sendable(key):
        problem = "contains characters that no key has" if key else "is not set"
        raise ConfigError(
            f"use rollout.auxiliary_models.{name}",
            f"the environment variable {variable} with its key {problem}",
            f"Set it, or name another one in rollout.auxiliary_models.{name}.api_key_env.",
        )
    return {"api_key": key}


def _variable(name: str) -> str:
    if (value := os.environ.get(name)) is None:
        raise ConfigError(
            "run the user's agent",
            f"the environment variable {name} is not set",
            "Set it, or take it out of rollout.agent_environment.",
        )
    return value
