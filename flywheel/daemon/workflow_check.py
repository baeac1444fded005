"""The check of the user's agent: a trial as an evaluation makes it, of one task, on a server of this project.

The agent runs three times in one process and three times in fresh ones, which should begin alike. What fails a trial
fails a rollout.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx2
from sqlalchemy import Connection

from flywheel.config.file import Config, parse
from flywheel.daemon.rounds.round_tasks import round_task
from flywheel.errors import ConfigError, ServeError
from flywheel.judge.rubric.checks.math_equal import boxes
from flywheel.records.program_run import RunResult
from flywheel.records.task import is_traced
from flywheel.records.trace import get_path
from flywheel.serving.replica_addresses import replica_urls
from flywheel.serving.server_keys import agents_key
from flywheel.sources.jsonl.record import rows_of_file
from flywheel.store import calibrations, rounds, samples
from flywheel.store.kernel.database import read_once
from flywheel.system.http_client import async_client, is_http_url
from flywheel.system.terminal import excerpt, quantity
from flywheel.system.web_server import CLIENT_GONE
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest
from flywheel.training.engine.endpoint import undecided
from flywheel.training.engine.remote_engine import RemoteApplication, RemoteEngine
from flywheel.training.engine.rollout_engine import ProgramSetup
from flywheel.training.engine.session import Session, SessionReply
from flywheel.training.program.agent_program import ModelEndpoint
from flywheel.training.program.program_pool import program_of

ATTEMPTED: Final = "check the workflow"
RUNS: Final = 3
"""Runs of the task in one process, and in fresh ones."""
BEFORE: Final = 8
"""Words that are shown before two messages differ."""
SHOWN: Final = 60
"""Characters that are shown of each of them."""
MOST_FAILURES: Final = 3
"""Accepted answers on which the judge fails before no more are tried."""
MOST_SHOWN: Final = 300
"""Characters of an error of the server."""
FAILED: Final = 502
"""The status of a call that another model has failed to answer."""
RETURNED: Final = ("response", "reward", "metrics", "seconds", "peak_bytes", "cause")
"""What is shown of a run's result."""


def _call(body: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """A call of `models`, of which the first answers for names that are none. Until it has an answer, it is as if its
    client had given it up."""
    name, messages, tools = body.get("model"), body.get("messages"), body.get("tools")
    names = [get_path(tool, "function", "name") for tool in tools] if isinstance(tools, list) else []
    return {
        "model": str(name) if name in models else models[0],
        "messages": len(messages) if isinstance(messages, list) else 0,
        "tools": [str(name) for name in names if name],
        "stream": bool(body.get("stream")),
        "status": CLIENT_GONE,
        "finish_reason": "",
        "prompt_tokens": None,
        "completion_tokens": None,
        "seconds": 0.0,
        "error": "its client stopped waiting for the answer; a rollout with such a call gets no reward",
    }


class _NotedSession(Session):
    """A session that notes what is asked of it, and what fails of what is asked of others.

    Attributes:
        first: The words of its first request as JSON: messages and tools. Empty if there was none.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.noted: list[dict[str, Any]] = []
        self.first: list[str] = []

    async def complete(self, body: Mapping[str, Any], *, attempt: int | None = None) -> SessionReply:
        sent = json.dumps([body.get("messages"), body.get("tools")], ensure_ascii=False)
        self.first = self.first or re.findall(r"\w+|\W", sent)
        self.noted.append(call := _call(body, self.models))
        began = time.monotonic()
        reply = await super().complete(body, attempt=attempt)
        call |= {"status": reply.status, "error": excerpt(reply.error, MOST_SHOWN)}
        call["seconds"] = round(time.monotonic() - began, 3)
        if reply.status == 200:
            call["finish_reason"] = str(reply.body["choices"][0].get("finish_reason") or "")
            call |= {name: get_path(reply.body, "usage", name) for name in ("prompt_tokens", "completion_tokens")}
        return reply

    def elsewhere(self, body: Mapping[str, Any]) -> Callable[[str], None]:
        ended = super().elsewhere(body)

        def noted(failure: str) -> None:
            if failure:
                self.noted.append(_call(body, (str(body.get("model")),)) | {"status": FAILED, "error": failure})
            ended(failure)

        return noted


@dataclass(frozen=True, slots=True)
class _Run:
    """A trial. `waited` are the seconds until it had a process."""

    completion: Completion
    calls: list[dict[str, Any]]
    first: list[str]
    waited: float

    @property
    def result(self) -> RunResult:
        assert self.completion.run is not None
        return self.completion.run


class _Engine(RemoteEngine):
    """The engine of an evaluation, which notes what sessions are asked."""

    session = _NotedSession
    last: Session

    def _session(self, request: RolloutRequest, **more: Any) -> Session:
        self.last = super()._session(request, **more)
        return self.last

    async def try_on(self, request: RolloutRequest) -> _Run:
        began = time.monotonic()
        completion = await self._with_program(request)
        assert completion.run is not None and isinstance(self.last, _NotedSession)
        waited = time.monotonic() - began - completion.run.seconds
        return _Run(completion, self.last.noted, self.last.first, waited)

    async def reward_of(self, request: RolloutRequest) -> RunResult:
        """What the reward function says of the answer of a task."""
        assert self._pool is not None
        setup, line = self._program, request.prompt.task.line
        url = self._endpoint.open(self._session(request))
        models = {target: ModelEndpoint(url, name) for target, name in setup.models.items()}
        try:
            return await self._pool.run(line, models, setup.trained, answer=line["answer"])
        finally:
            self._endpoint.close(url)

    @property
    def notes(self) -> list[str]:
        assert self._pool is not None
        return self._pool.notes


async def check(
    config: Config, function: str | None, task: str | None, url: str | None, model: str | None, answers: int
) -> dict[str, Any]:
    """Run the agent of the settings, or the workflow `function`, on a task: the first one of a file, the one of the
    state with this id, or the one that a round takes first.

    `url` is the server, without `/v1`; by default the first one of the settings, and `model` their aliases. The
    reward function also gets at most so many accepted `answers` of the state. Returns the record that
    `flywheel workflow check --json` prints: of the first run, with `problems` that a round would fail on, and how
    further ones began. Raises ConfigError if the agent or the task cannot be loaded, and ServeError if the server
    does not answer.
    """
    config = with_function(config, function)
    line = _first_line(task)
    if line is None:
        line = await read_once(config.state_dir, _stored_line, config, task)
    program = program_of(config)
    if program is None:
        why = "rollout.agent names no workflow and no command"
        raise ConfigError(ATTEMPTED, why, "Name one there, or as FILE.py:function on the command line.")
    lines: list[dict[str, Any]] = []
    if program.reward_function and answers:
        lines = await read_once(config.state_dir, samples.accepted_lines, answers)
    server = (url or next(iter(await replica_urls(config.serving)))).rstrip("/")
    if not is_http_url(server):
        raise ConfigError(ATTEMPTED, f"{server} is no HTTP URL", "Name a server, such as http://127.0.0.1:8000.")
    key = agents_key(config.serving, ATTEMPTED)
    (trained, own), *others = config.by_target().items()
    models = {name: model or each.model.alias for name, each in [(trained, own), *others]}
    # Nothing says who answers for a name that is none of these.
    program = replace(program, models=dict.fromkeys(models.values(), "policy") | dict(program.models))
    frozen = {name: LoadedAdapter(name, 0) for name in models.values() if name != models[trained]}
    setup = ProgramSetup.of(own, trained, models, frozen)
    endpoint = ModelEndpoint(f"{server}/v1", models[trained], key or "unused")
    engine = _Engine(RemoteApplication(endpoint, seconds=config.rollout.timeout_seconds))
    await engine.start()
    try:
        # Loaded first: what is wrong with it is the user's, whether or not a server runs.
        signature = await engine.use_program(_settings(config, "process"), setup)
        await _require_server(server, key)
        request = _request(line, config)
        first = await engine.try_on(request)
        result, asked, problems = first.result, engine.asked_models(), _problems(first)
        notes = [*engine.notes, *filter(None, [undecided(program, asked)])]
        again = 0 if problems else RUNS
        in_one = [first, *[await engine.try_on(request) for _ in range(again - 1)]]
        accepted = [_request(each, config) for each in lines if is_traced(each)]
        judge, harsh = await _replayed(engine, accepted)
        isolation: dict[str, Any] | None = None
        if again:
            await engine.use_program(_settings(config, "run"), setup)
            isolation, differing = _compared(in_one, [await engine.try_on(request) for _ in range(again)])
            notes += differing
    finally:
        await engine.stop()
    if result.idle_threads:
        threads = quantity(len(result.idle_threads), "thread that runs", "threads that run")
        notes.append(
            f"after the run, its process has {threads} none of its code: {', '.join(result.idle_threads)}."
            " That costs nothing, unless one calls the model"
        )
    return {
        "function": signature,
        "task_id": line["task_id"],
        "calls": first.calls,
        "models": asked,
        **{name: getattr(result, name) for name in RETURNED},
        "problems": problems + harsh,
        "notes": notes,
        "judge": judge,
        "isolation": isolation,
    }


async def _replayed(engine: _Engine, accepted: Sequence[RolloutRequest]) -> tuple[dict[str, Any] | None, list[str]]:
    """How many accepted answers the reward function got, and the tasks whose ones it does not reward, by reason; None
    without any. The problem if these are all."""
    unmatched: dict[str, list[str]] = {}
    count = failed = 0
    for request in accepted:
        if count == failed == MOST_FAILURES:
            break
        count += 1
        judged, task = await engine.reward_of(request), request.prompt.task
        failed += judged.cause is not None
        if not _is_rewarded(judged):
            unmatched.setdefault(_why_unmatched(task.line["answer"], judged), []).append(task.task_id)
    if not count:
        return None, []
    are_all = not failed and sum(map(len, unmatched.values())) == count
    problem = f"its judge rewards none of {quantity(count, 'accepted answer')}"
    return {"answers": count, "unmatched": unmatched}, [problem] * are_all


def with_function(config: Config, function: str | None) -> Config:
    """The settings with this function, if one is given, whose path is relative to the working directory."""
    if function is None:
        return config
    rollout = config.rollout.model_dump(mode="json")
    given = rollout["agent"] if isinstance(rollout["agent"], dict) else {}
    folder = given.get("folder") or str(Path.cwd())
    agent = {"workflow": function, "python": given.get("python"), "folder": folder}
    rollout["agent"] = agent | {"config": given.get("config", {})}
    return parse(config.model_dump(mode="json") | {"rollout": rollout}, "with this workflow", Path.cwd())


def _settings(config: Config, isolation: str) -> dict[str, Any]:
    """The settings of an agent that runs in one process here, or in one for each run."""
    made = config.model_dump(mode="json")
    made["rollout"]["agent"]["isolation"] = isolation
    made["rollout"]["workers"] = 1
    # The engine is in this process, and not in a copy of the folder.
    made["ray"]["working_dir"] = None
    return made


def _request(line: dict[str, Any], config: Config) -> RolloutRequest:
    task = round_task(line, config, is_accepted=True)
    return RolloutRequest(Prompt(task, ()), 0, config.training.seed, None, None, None, as_served=True)


def _stored_line(conn: Connection, config: Config, task: str | None) -> dict[str, Any]:
    """The line of the task of this id, or else of the one that a round takes first. Raises ConfigError."""
    if task is not None:
        found = calibrations.lines_of(conn, [task]).get(task)
        why = f"{task} is neither a file nor a task of the state"
    else:
        free = samples.candidates(conn, config.takes.train, 1)
        found = next(iter(rounds.payloads(conn, [row.id for row in free])), None)
        why = "the state has no accepted task for a round"
    if found is None:
        raise ConfigError("find a task for the workflow", why, "Name a file of tasks with --task FILE.jsonl.")
    return found


def _first_line(task: str | None) -> dict[str, Any] | None:
    """The first task of a file; None for what names none. Raises ConfigError."""
    path = Path(task or "").expanduser()
    if task is None or not path.is_file():
        return None
    attempted = f"read a task from {path}"
    for row in rows_of_file(path, attempted):
        return row.task
    raise ConfigError(attempted, "it is empty", "Name a file with one task per line.")


async def _require_server(url: str, key: str | None) -> None:
    """Raise ServeError unless the server answers, and takes the agents' key."""
    why = ""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with async_client(url, seconds=30, headers=headers) as http:
            status = (await http.get("/v1/models")).status_code
        if status in (401, 403):
            why = f"it refuses the agents' key (HTTP status {status})"
    except httpx2.HTTPError as error:
        why = str(error) or type(error).__name__
    if why:
        hint = "Start `flywheel serve`, or name a server with --url; serving.api_key_env names its key."
        raise ServeError(f"check the workflow against {url}", why, hint, retryable=True)


def _problems(run: _Run) -> list[str]:
    """What a rollout would fail on, or all of a round: with nothing to grade, no reward counts."""
    if run.completion.error:
        return [run.completion.error]
    if run.result.reward is None and run.result.response is None:
        return ["it returned neither a reward nor a response with a text"]
    return []


def _compared(in_one: Sequence[_Run], in_fresh: Sequence[_Run]) -> tuple[dict[str, Any], list[str]]:
    """What runs of the same task say about state that one leaves to the next (`isolation`), and notes for users."""
    first, found = in_one[0], "same"
    failed = [run.completion for run in (*in_one, *in_fresh) if run.completion.error]
    notes = [f"a further run of the task failed: {each.error}" for each in failed]
    # What differs between fresh processes (the first run had one, too) says nothing about state in a process.
    varying = {place for run in in_fresh for place in _places(first, run)}
    is_comparable = all(len(run.first) == len(first.first) for run in in_fresh)
    if varying:
        found, place = "differs in fresh processes", min(varying)
        other = next(run for run in in_fresh if place in _places(first, run))
        notes.append(
            "the first message differs in fresh processes, too (time, chance, or files that runs leave):"
            f" {_shown(first, place)}, and then {_shown(other, place)}"
        )
    if is_comparable and (kept := next((run for run in in_one if _places(first, run) - varying), None)):
        found, place = "differs in one process", min(_places(first, kept) - varying)
        notes.append(
            "state seems to leak from one run to the next in the same process: the first message was"
            f" {_shown(first, place)}, and then {_shown(kept, place)}. Keep no state in globals, or set"
            " rollout.agent.isolation: run (one process per run)"
        )
    seconds = statistics.median(run.waited for run in in_fresh)
    return {"first_message": found, "process_seconds": seconds}, [*dict.fromkeys(notes)]


def _places(first: _Run, other: _Run) -> set[int]:
    """Where the words of their first messages differ."""
    pairs = itertools.zip_longest(first.first, other.first)
    return {place for place, (was, became) in enumerate(pairs) if was != became}


def _shown(run: _Run, place: int) -> str:
    return excerpt("".join(run.first[max(0, place - BEFORE) :]), SHOWN) or "none at the address of the run"


def _is_rewarded(judged: RunResult) -> bool:
    """AgentJet's judges say whether an answer is right beside the reward."""
    return judged.cause is None and bool(judged.metrics.get("is_success", (judged.reward or 0) > 0))


def _why_unmatched(answer: str, judged: RunResult) -> str:
    if judged.cause is not None:
        return judged.error
    found = boxes(answer)
    if not found:
        return "there is no \\boxed{…}"
    if any(brace in found[-1] for brace in "{}"):
        return "the box has nested braces, and the pattern stops at the first }"
    return "there are several boxes" if len(found) > 1 else f"the reward is {judged.reward:g}"
