"""An OpenAI API on loopback for the agents of rollouts. Each rollout has a secret in its path, which no other knows.

The server behind it never streams, because streamed token ids are incomplete in some versions of vLLM; a client that
asks for a stream gets the complete response as one. Requests that name another model are counted, and auxiliary
models answer them, or nobody.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Final

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from flywheel.secrets import redact_secrets
from flywheel.system.http_client import async_client
from flywheel.system.terminal import excerpt, quantity
from flywheel.system.web_server import CLIENT_GONE, BackgroundServer, bound_socket, unless_left
from flywheel.training.engine.session import Session, SessionReply, refusal
from flywheel.training.program.agent_program import AgentProgram

HOST: Final = "127.0.0.1"
BACKLOG: Final = 128
MOST_SHOWN: Final = 200
"""Characters of another server's error."""


class RolloutEndpoint:
    """Call `start` in the loop that serves it, and `stop` at the end. `others` answer what the rollouts' sessions do
    not."""

    def __init__(self) -> None:
        self.others = OtherModels(AgentProgram())
        self._sessions: dict[str, Session] = {}
        self._refused: set[str] = set()
        """What was asked for and belongs to no rollout, by digest."""
        self._server: BackgroundServer | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen on a port that the system chooses."""
        routes = [
            Route("/s/{secret}/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/s/{secret}/v1/models", self._models),
        ]
        app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})
        listening = bound_socket("serve the agents of rollouts", HOST, 0, "rollout.agent")
        self._port = listening.getsockname()[1]
        self._server = BackgroundServer(app, listening, "the endpoint of agents")

    async def stop(self) -> None:
        for session in self._sessions.values():
            session.close()
        if self._server is not None:
            await self._server.stop()

    def open(self, session: Session) -> str:
        """The base URL of a rollout."""
        secret = secrets.token_urlsafe(32)
        self._sessions[_digest(secret)] = session
        return f"http://{HOST}:{self._port}/s/{secret}/v1"

    def close(self, url: str) -> Session:
        """End the rollout with this base URL: requests in flight are refused, and nothing is found there later."""
        session = self._sessions.pop(_digest(url.split("/")[-2]))
        session.close()
        return session

    def was_called_late(self, url: str) -> bool:
        """Whether a call came to this base URL after its rollout had ended."""
        return _digest(url.split("/")[-2]) in self._refused

    async def _complete(self, request: Request) -> Response:
        session = self._sessions.get(digest := _digest(request.path_params["secret"]))
        if session is None:
            self._refused.add(digest)
            return await _not_found()
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            return _error(400, f"the body is not JSON: {error}", "BadRequestError")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object", "BadRequestError")
        count = request.headers.get("x-stainless-retry-count", "")
        attempt = int(count) if count.isdecimal() else None
        try:
            found = await unless_left(request, self._answer(request, session, body, attempt))
        except Exception as error:
            return _error(500, f"the engine failed: {' '.join(str(error).split())[:200]}", "InternalServerError")
        return Response(status_code=CLIENT_GONE) if found is None else found

    async def _answer(
        self, request: Request, session: Session, body: Mapping[str, Any], attempt: int | None
    ) -> Response:
        ended = session.elsewhere(body) if self.others.auxiliary_of(body) is not None else None
        if (found := await self.others.answer(body, is_retry=bool(attempt))) is not None:
            if ended is not None:
                ended(failure_of(found))
            return found
        reply = await session.complete(body, attempt=attempt)
        if reply.status == 200 and body.get("stream"):
            events = _streamed(request, _events(body, reply.body), session.stream(body))
            return StreamingResponse(events, media_type="text/event-stream")
        return _json(reply)

    async def _models(self, request: Request) -> Response:
        session = self._sessions.get(_digest(request.path_params["secret"]))
        if session is None:
            return await _not_found()
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "flywheel"} for name in session.models]
        return _json(SessionReply(200, {"object": "list", "data": models}))


def _events(body: Mapping[str, Any], answer: Mapping[str, Any]) -> Iterator[str]:
    """A complete response as the events of a stream: the role, reasoning, text, each tool call, and the end."""
    common = {name: answer[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk"
    options = body.get("stream_options")
    with_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        usage = {"usage": None} if with_usage else {}
        return f"data: {json.dumps({**common, 'choices': choices, **usage, **more})}\n\n"

    for place, choice in enumerate(answer["choices"]):
        index, message = choice.get("index", place), choice["message"]
        tokens = {"prompt_token_ids": answer["prompt_token_ids"]} if "prompt_token_ids" in answer else {}

        def delta(content: dict[str, Any], index: int = index, **more: Any) -> dict[str, Any]:
            return {"index": index, "delta": content, "logprobs": None, "finish_reason": None, **more}

        yield event([delta({"role": message.get("role", "assistant"), "content": ""})], **tokens)
        if message.get("reasoning"):
            yield event([delta({"reasoning": message["reasoning"]})])
        if message.get("content"):
            yield event([delta({"content": message["content"]})])
        for number, call in enumerate(message.get("tool_calls") or ()):
            yield event([delta({"tool_calls": [{"index": number, **call}]})])
        ends = {
            name: choice[name] for name in ("finish_reason", "stop_reason", "token_ids", "logprobs") if name in choice
        }
        yield event([delta({}, **ends)])
    if with_usage:
        yield event([], usage=answer.get("usage"))
    yield "data: [DONE]\n\n"


async def _streamed(request: Request, events: Iterator[str], sent: Callable[[], None]) -> AsyncIterator[str]:
    """Calls `sent` before the last two events, because a client may be done with the answer once it has one."""
    *most, finish, last = events
    # The server sends an empty one only after what it holds of those before.
    for event in (*most, ""):
        yield event
    if not await request.is_disconnected():
        sent()
    yield finish
    yield last


async def _not_found(*_: object) -> Response:
    return _error(404, "Not Found", "NotFoundError")


def _error(status: int, message: str, kind: str) -> Response:
    return _json(refusal(status, message, kind))


def _json(reply: SessionReply) -> Response:
    return Response(json.dumps(reply.body), reply.status, media_type="application/json")


def _digest(secret: str) -> str:
    """Secrets are looked up by their hashes, so that the time it takes tells nothing about them."""
    return hashlib.sha256(secret.encode()).hexdigest()


class OtherModels:
    """Answers in place of the policy, as `AgentProgram.answered_by` says.

    Attributes:
        asked: How often each name was asked for, those that the policy answers included.
    """

    def __init__(self, program: AgentProgram) -> None:
        self.asked: Counter[str] = Counter()
        self._program = program

    def auxiliary_of(self, body: Mapping[str, Any]) -> str | None:
        """The key of the auxiliary model that answers a chat request; None if none does."""
        name = body.get("model")
        if not isinstance(name, str) or self._program.answered_by(name) != "auxiliary":
            return None
        return self._program.auxiliary_name(name)

    async def answer(self, body: Mapping[str, Any], *, is_retry: bool = False) -> Response | None:
        """The response to a chat request; None if it is for the policy. A client's retry is not counted."""
        name = body.get("model")
        if not isinstance(name, str):
            return None
        if not is_retry:
            self.asked[name] += 1
        if self._program.answered_by(name) == "refuse":
            return _error(404, f"the model {name} is refused (rollout.models)", "NotFoundError")
        key = self.auxiliary_of(body)
        return None if key is None else await self._of_auxiliary(key, body)

    async def _of_auxiliary(self, key: str, body: Mapping[str, Any]) -> Response:
        """A stream arrives as a whole."""
        endpoint, seconds = self._program.auxiliary_models[key], self._program.seconds  # no run waits longer
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        try:
            async with async_client(endpoint.base_url, seconds=seconds, headers=headers, proxies=True) as http:
                found = await http.post("/chat/completions", json={**body, "model": endpoint.model})
        except (httpx2.HTTPError, ValueError) as error:
            why = f"rollout.auxiliary_models.{key} does not answer: {str(error) or type(error).__name__}"
            return _error(502, why, "BadGatewayError")
        return Response(found.content, found.status_code, media_type=found.headers.get("content-type"))


def failure_of(response: Response) -> str:
    """Why an auxiliary model gave no answer, which is no fault of the request; empty otherwise."""
    status = response.status_code
    if status < 500 and status != 429:
        return ""
    try:
        why = redact_secrets(SessionReply(status, json.loads(bytes(response.body))).error)
    except (ValueError, AttributeError):
        why = ""
    return f"an auxiliary model failed (HTTP status {status}){f': {excerpt(why, MOST_SHOWN)}' if why else ''}"


def listed(asked: Mapping[str, int]) -> str:
    """Names with how often each was asked for: `my-agent 2 times, gpt-4o-mini 1 time`."""
    return ", ".join(f"{name} {quantity(times, 'time')}" for name, times in asked.items())


def undecided(program: AgentProgram, asked: Mapping[str, int]) -> str:
    """A warning about names that the policy answers only because nothing says who does; empty without one."""
    names = {name: times for name, times in asked.items() if program.answered_by(name) is None}
    if not names:
        return ""
    return (
        f"the agent asks for {listed(names)}, which is neither an alias nor the base nor an auxiliary model: the"
        " policy answers, and is trained on it. rollout.models says who answers (policy, auxiliary or refuse)"
    )
