"""Runs the user's agent on a task against the server, through a proxy that notes its calls of the model: three times
in one process and three times in fresh ones, which should begin alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flywheel.errors import ServeError
from flywheel.judge.rubric.checks.math_equal import boxes
from flywheel.records.program_run import RunResult
from flywheel.records.trace import get_path
from flywheel.sources.calls.parsing import error_in, events
from flywheel.system.http_client import async_client
from flywheel.system.server_limits import Limited, ServerLimits, refuse_in_text
from flywheel.system.terminal import excerpt, quantity
from flywheel.system.web_server import CLIENT_GONE, BackgroundServer, bound_socket, unless_left
from flywheel.training.engine.endpoint import OtherModels, failure_of, undecided
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.program_pool import ProgramPool

HOST: Final = "127.0.0.1"
CHAT: Final = "/chat/completions"
RUNS: Final = 3
"""Runs of the task in one process, and in fresh ones."""
BEFORE: Final = 8
"""Words that are shown before two messages differ."""
SHOWN: Final = 60
"""Characters that are shown of each of them."""
MOST_FAILURES: Final = 3
"""Accepted answers on which the judge fails before no more are tried."""
GIVEN_UP: Final = (CLIENT_GONE, "its client gave it up before the answer, which leaves a rollout without a reward")
"""Status and error of a call whose client has left."""
NOT_SENT_ON: Final = frozenset({"host", "content-length", "authorization", "connection", "transfer-encoding"})
NOT_SENT_BACK: Final = frozenset({"content-length", "content-encoding", "connection", "transfer-encoding", "date"})


@dataclass(slots=True)
class CheckedCall:
    """A call of the model. Tokens are None where the server did not count them."""

    model: str
    messages: int
    tools: list[str]
    stream: bool
    status: int = 0
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    error: str = ""


@dataclass(slots=True)
class _Run:
    """A run with an address of its own, as in a round.

    Attributes:
        first: The words of its first request as JSON: messages and tools. Empty if it made none.
        waited: Seconds until it had a process.
    """

    url: str
    calls: list[CheckedCall] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    result: RunResult = field(default_factory=RunResult)
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Checked:
    """The first run of a program, and how further ones began.

    Attributes:
        function: Its signature and place, or its command.
        models: How often it asked for each model at the policy's address.
        problems: What a round would fail on, in sentences; empty if nothing.
        notes: What else users should know, in sentences.
        replayed: Number of accepted answers that the judge got.
        unmatched: The tasks whose accepted answers it does not reward, by reason.
        isolation: How further runs of the task began: `first_message` is `same`, `differs in one process` or `differs
            in fresh processes`; `process_seconds` is what a process takes before its first run, with imports and
            setup (the median). None if there were none, because the first run had problems.
    """

    function: str
    task_id: str
    question: str
    calls: list[CheckedCall]
    result: RunResult
    models: Mapping[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    replayed: int = 0
    unmatched: Mapping[str, list[str]] = field(default_factory=dict)
    isolation: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """What `flywheel workflow check --json` prints."""
        result = asdict(self.result)
        return {
            "function": self.function,
            "task_id": self.task_id,
            "calls": [asdict(call) for call in self.calls],
            "models": self.models,
            **{name: result[name] for name in ("response", "reward", "metrics", "seconds", "peak_bytes", "cause")},
            "problems": self.problems,
            "notes": self.notes,
            "judge": {"answers": self.replayed, "unmatched": self.unmatched} if self.replayed else None,
            "isolation": self.isolation,
        }


async def check(
    program: AgentProgram,
    task: Mapping[str, Any],
    url: str,
    models: Mapping[str, str],
    *,
    key: str | None = None,
    accepted: Sequence[Mapping[str, Any]] = (),
) -> Checked:
    """Run the program on a task (a line of the task file) against the server at `url` (without `/v1`), and its reward
    function on the answers of the tasks `accepted`.

    `models` are the names of its models by target; the first one is the `model` argument. `key` is the agents' key of
    the server. Raises ConfigError if the program does not load, and ServeError if the server does not answer.
    """
    program = replace(program, models=dict.fromkeys(models.values(), "policy") | dict(program.models))
    pool, fresh = (ProgramPool(replace(program, isolation=each), workers=1) for each in ("process", "run"))
    try:
        # In a thread: loading may take long, and Ctrl-C ends it.
        function = await asyncio.to_thread(pool.start)
        async with _Proxy(url, key, models, OtherModels(program)) as proxy:
            await proxy.require_server()
            first = await proxy.run(pool, task)
            result = first.result
            problems = _problems(result, first.calls)
            asked = dict(proxy.others.asked)
            notes = [*pool.notes, *filter(None, [undecided(program, asked)])]
            again = 0 if problems else RUNS
            in_one = [first, *[await proxy.run(pool, task) for _ in range(again - 1)]]
            unmatched: dict[str, list[str]] = {}
            replayed = failed = 0
            for each in accepted:
                if replayed == failed == MOST_FAILURES:
                    break
                replayed += 1
                judged = (await proxy.run(pool, each, answer=each["answer"])).result
                failed += judged.cause is not None
                if not _is_rewarded(judged):
                    unmatched.setdefault(_why_unmatched(each["answer"], judged), []).append(each["task_id"])
            # Closed first: a setup may start what only one process can have.
            await asyncio.to_thread(pool.close)
            in_fresh = [await proxy.run(fresh, task) for _ in range(again)]
            isolation, differing = _compared(in_one, in_fresh) if in_fresh else (None, [])
            if replayed and not failed and sum(map(len, unmatched.values())) == replayed:
                problems.append(f"its judge rewards none of {quantity(replayed, 'accepted answer')}")
            if result.idle_threads:
                threads = quantity(len(result.idle_threads), "thread that runs", "threads that run")
                notes.append(
                    f"after the run, its process has {threads} none of its code: {', '.join(result.idle_threads)}."
                    " That costs nothing, unless one calls the model"
                )
            return Checked(
                function,
                str(task.get("task_id") or ""),
                str(task.get("main_query") or ""),
                first.calls,
                result,
                asked,
                problems,
                [*notes, *differing],
                replayed,
                unmatched,
                isolation,
            )
    finally:
        for one in (pool, fresh):
            await asyncio.to_thread(one.close)


def _compared(in_one: Sequence[_Run], in_fresh: Sequence[_Run]) -> tuple[dict[str, Any], list[str]]:
    """What runs of the same task say about state that one leaves to the next (`isolation`), and notes for users."""
    first, found = in_one[0], "same"
    failed = [run.result for run in (*in_one, *in_fresh) if run.result.cause is not None]
    notes = [f"a further run of the task failed ({each.cause}): {each.error}" for each in failed]
    # What differs between fresh processes (the first run had one, too) says nothing about state in a process.
    varying = {place for run in in_fresh for place in _places(first, run)}
    is_comparable = all(len(run.first) == len(first.first) for run in in_fresh)
    if varying:
        found, place = "differs in fresh processes", min(varying)
        other = next(run for run in in_fresh if place in _places(first, run))
        notes.append(
            "the first message differs also in fresh processes, by the time, chance, or what runs leave in files:"
            f" {_shown(first, place)}, and then {_shown(other, place)}"
        )
    if is_comparable and (kept := next((run for run in in_one if _places(first, run) - varying), None)):
        found, place = "differs in one process", min(_places(first, kept) - varying)
        notes.append(
            "state of one run seems to reach the next one in its process, since the first message was"
            f" {_shown(first, place)}, and then {_shown(kept, place)}: keep none in globals, or let each run have a"
            " process of its own with rollout.agent.isolation: run"
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
        return "there are nested braces in the box, which a pattern that ends at the first } cuts"
    return "there are several boxes" if len(found) > 1 else f"the reward is {judged.reward:g}"


def _problems(result: RunResult, calls: list[CheckedCall]) -> list[str]:
    problems = []
    if result.cause is not None:
        problems.append(f"the run failed ({result.cause}): {result.error}")
    elif result.reward is None and result.response is None:
        problems.append("it returned neither a reward nor a response with a text")
    if not calls:
        problems.append(
            "it did not call the model, so nothing could be trained. It must call the `model` that it is given, or"
            " the endpoint in task['openai']"
        )
    failed = [call for call in calls if call.status != 200]
    if failed:
        problems.append(
            f"{len(failed)} of its {len(calls)} calls of the model failed; the first: HTTP status {failed[0].status}:"
            f" {failed[0].error}"
        )
    return problems


class _Proxy:
    """An HTTP proxy of the server on loopback, which has an address for each run. As in a round, `others` answer
    calls of other models than `models` (names by target), or they are sent as ones of the first of these."""

    def __init__(self, url: str, key: str | None, models: Mapping[str, str], others: OtherModels) -> None:
        self._models, self.others = models, others
        self._runs: list[_Run] = []
        self._server_url = url.rstrip("/")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Generating may take long.
        self._http = async_client(self._server_url, seconds=httpx2.Timeout(None, connect=10), headers=headers)

    async def __aenter__(self) -> _Proxy:
        methods = ["GET", "POST", "PUT", "DELETE"]
        app = Starlette(routes=[Route("/{run:int}/{path:path}", self._pass_on, methods=methods)])
        listening = bound_socket("check the workflow", HOST, 0, "serving.urls")
        self._address = f"http://{HOST}:{listening.getsockname()[1]}"
        self._web = BackgroundServer(
            Limited(app, ServerLimits(), refuse_in_text), listening, "the proxy of the server"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._web.stop()
        await self._http.aclose()

    async def require_server(self) -> None:
        """Raise ServeError unless the server answers."""
        why = ""
        try:
            status = (await self._http.get("/v1/models", timeout=30)).status_code
            if status in (401, 403):
                why = f"it refuses the agents' key (HTTP status {status})"
        except httpx2.HTTPError as error:
            why = str(error) or type(error).__name__
        if why:
            hint = "Start `flywheel serve`, or name a server with --url; serving.api_key_env names its key."
            raise ServeError(f"check the workflow against {self._server_url}", why, hint, retryable=True)

    async def run(self, pool: ProgramPool, task: Mapping[str, Any], answer: str | None = None) -> _Run:
        """Run the program as `ProgramPool.run` does, at an address of its own."""
        run = _Run(f"{self._address}/{len(self._runs)}/v1")
        self._runs.append(run)
        models = {target: ModelEndpoint(run.url, name) for target, name in self._models.items()}
        began = time.monotonic()
        run.result = await pool.run(task, models, next(iter(models)), answer=answer)
        run.waited = time.monotonic() - began - run.result.seconds
        for call in run.calls:
            if not call.status:
                call.status, call.error = GIVEN_UP
        return run

    async def _pass_on(self, request: Request) -> Response:
        body = await request.body()
        number, path, call = request.path_params["run"], f"/{request.path_params['path']}", None
        if number != len(self._runs) - 1:
            return Response("this is the address of a run that has ended", 404)
        if path.endswith(CHAT):
            asked = _object(body)
            if (found := await self.others.answer(asked)) is not None:
                if failure_of(found):
                    self._runs[number].calls.append(failed := _call(body))
                    failed.status = found.status_code
                    _read_answer(failed, bytes(found.body))
                return found
            if asked and str(asked.get("model")) not in self._models.values():
                body = json.dumps({**asked, "model": next(iter(self._models.values()))}).encode()
            run = self._runs[number]
            sent = json.dumps([asked.get("messages"), asked.get("tools")], ensure_ascii=False)
            run.first = run.first or re.findall(r"\w+|\W", sent)
            run.calls.append(call := _call(body))
        headers = {name: value for name, value in request.headers.items() if name not in NOT_SENT_ON}
        began = time.monotonic()
        asking = self._http.request(request.method, path, params=request.query_params, content=body, headers=headers)
        try:
            answer = await unless_left(request, asking)
        except httpx2.HTTPError as error:
            if call is not None:
                call.status, call.error = 502, str(error) or type(error).__name__
            return Response(f"the server does not answer: {error}", 502)
        if answer is None:
            if call is not None:
                call.status, call.error = GIVEN_UP
            return Response(status_code=CLIENT_GONE)
        if call is not None and not call.status:
            call.status, call.seconds = answer.status_code, round(time.monotonic() - began, 3)
            _read_answer(call, answer.content)
        kept = {name: value for name, value in answer.headers.items() if name not in NOT_SENT_BACK}
        return Response(answer.content, answer.status_code, kept)


def _call(body: bytes) -> CheckedCall:
    asked = _object(body)
    tools, messages = asked.get("tools"), asked.get("messages")
    names = [get_path(tool, "function", "name") for tool in tools] if isinstance(tools, list) else []
    return CheckedCall(
        model=str(asked.get("model") or ""),
        messages=len(messages) if isinstance(messages, list) else 0,
        tools=[str(name) for name in names if name],
        stream=bool(asked.get("stream")),
    )


def _read_answer(call: CheckedCall, content: bytes) -> None:
    """Fill in what a response, or the events of a stream, say."""
    parts = [_object(data) for data in (events(content) if content.startswith(b"data:") else [content])]
    for part in parts:
        usage = _mapping(part.get("usage"))
        call.prompt_tokens = usage.get("prompt_tokens", call.prompt_tokens)
        call.completion_tokens = usage.get("completion_tokens", call.completion_tokens)
        for choice in part.get("choices") or ():
            call.finish_reason = str(_mapping(choice).get("finish_reason") or call.finish_reason)
    if call.status != 200:
        call.error = " ".join((error_in(parts[0]) or content[:200].decode(errors="replace")).split())[:300]


def _object(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
