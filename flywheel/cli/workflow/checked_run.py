"""Runs the user's agent once against the server, through a proxy that notes its calls of the model."""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from flywheel.system.terminal import quantity
from flywheel.system.web_server import BackgroundServer, bound_socket
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.other_models import OtherModels, undecided
from flywheel.training.program.program_pool import ProgramPool

HOST: Final = "127.0.0.1"
CHAT: Final = "/chat/completions"
MOST_FAILURES: Final = 3
"""Accepted answers on which the judge fails before no more are tried."""
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


@dataclass(frozen=True, slots=True)
class Checked:
    """One run of a program.

    Attributes:
        function: Its signature and place, or its command.
        models: How often it asked for each model at the policy's address.
        problems: What a round would fail on, in sentences; empty if nothing.
        notes: What else users should know, in sentences.
        replayed: Number of accepted answers that the judge got.
        unmatched: The tasks whose accepted answers it does not reward, by reason.
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
    """Run the program once on a task (a line of the task file) against the server at `url` (without `/v1`), and its
    reward function on the answers of the tasks `accepted`.

    `models` are the names of its models by target; the first one is the `model` argument. `key` is the agents' key of
    the server. Raises ConfigError if the program does not load, and ServeError if the server does not answer.
    """
    program = replace(program, models=dict.fromkeys(models.values(), "policy") | dict(program.models))
    pool = ProgramPool(program, workers=1)
    try:
        # In a thread: loading may take long, and Ctrl-C ends it.
        function = await asyncio.to_thread(pool.start)
        trained = next(iter(models))
        async with _Proxy(url, key, {*models.values()}, models[trained], OtherModels(program)) as proxy:
            await proxy.require_server()
            endpoints = {target: ModelEndpoint(f"{proxy.url}/v1", name) for target, name in models.items()}
            result = await pool.run(task, endpoints, trained)
            problems = _problems(result, proxy.calls)
            asked = dict(proxy.others.asked)
            notes = [*pool.notes, *filter(None, [undecided(program, asked)])]
            unmatched: dict[str, list[str]] = {}
            replayed = failed = 0
            for each in accepted:
                if replayed == failed == MOST_FAILURES:
                    break
                replayed += 1
                judged = await pool.run(each, endpoints, trained, answer=each["answer"])
                failed += judged.cause is not None
                if not _is_rewarded(judged):
                    unmatched.setdefault(_why_unmatched(each["answer"], judged), []).append(each["task_id"])
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
                proxy.calls,
                result,
                asked,
                problems,
                notes,
                replayed,
                unmatched,
            )
    finally:
        await asyncio.to_thread(pool.close)


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
    """An HTTP proxy of the server on loopback. `calls` are the calls of the model so far. As in a round, `others`
    answer calls of other models than `models`, or they are sent as ones of `otherwise`."""

    def __init__(self, url: str, key: str | None, models: set[str], otherwise: str, others: OtherModels) -> None:
        self._models, self._otherwise, self.others = models, otherwise, others
        self.calls: list[CheckedCall] = []
        self._server_url = url.rstrip("/")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Generating may take long.
        self._http = async_client(self._server_url, seconds=httpx2.Timeout(None, connect=10), headers=headers)

    async def __aenter__(self) -> _Proxy:
        methods = ["GET", "POST", "PUT", "DELETE"]
        app = Starlette(routes=[Route("/{path:path}", self._pass_on, methods=methods)])
        listening = bound_socket("check the workflow", HOST, 0, "serving.urls")
        self.url = f"http://{HOST}:{listening.getsockname()[1]}"
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

    async def _pass_on(self, request: Request) -> Response:
        body = await request.body()
        call = None
        if request.scope["path"].endswith(CHAT):
            asked = _object(body)
            if (found := await self.others.answer(asked)) is not None:
                return found
            if asked and str(asked.get("model")) not in self._models:
                body = json.dumps({**asked, "model": self._otherwise}).encode()
            self.calls.append(call := _call(body))
        headers = {name: value for name, value in request.headers.items() if name not in NOT_SENT_ON}
        began = time.monotonic()
        try:
            answer = await self._http.request(
                request.method, request.scope["path"], params=request.query_params, content=body, headers=headers
            )
        except httpx2.HTTPError as error:
            if call is not None:
                call.status, call.error = 502, str(error) or type(error).__name__
            return Response(f"the server does not answer: {error}", 502)
        if call is not None:
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
