"""An engine whose model answers at any OpenAI-compatible endpoint: rollouts to measure, not to learn from.

It runs in this process and needs neither Ray nor vLLM. Messages come without token ids, so that rollouts have no
samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import httpx2

from flywheel.errors import EndpointError, FlywheelError
from flywheel.judge.answer import REASONING_END
from flywheel.records.trace import get_path
from flywheel.system.http_client import CallError, model_client, post_chat, retrying
from flywheel.system.signals import in_daemon_thread
from flywheel.training.data.rollout import Completion, RolloutRequest, text_of
from flywheel.training.engine.rollout_engine import RolloutEngine
from flywheel.training.engine.served_application import BASE_MODEL, Limits
from flywheel.training.engine.session import OF_REQUEST
from flywheel.training.program.agent_program import ModelEndpoint

log = logging.getLogger(__name__)

ATTEMPTS: Final = 5
MOST_FAILURES: Final = 8
"""Calls in a row that may fail, each after all of its attempts, before the endpoint counts as away."""
REFUSALS: Final[Mapping[int, str]] = {
    401: "Put the right key into the environment variable that --api-key-env names.",
    402: "Fill up the account of the key.",
    403: "Use a key with access to this model.",
    404: "Check --model and --base-url, which is the API's root, such as http://127.0.0.1:8000/v1.",
}
"""Statuses that every other call would get too, until one was answered, with the remedy."""
OF_ENGINE: Final = (
    "n", "seed", "logprobs", "top_logprobs", "return_token_ids", "include_reasoning",
)  # fmt: skip
"""What a session adds to requests for its own engine; some endpoints reject it."""
_REASONING_START: Final = re.compile(
    r"<(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)>|\[THINK\]|◁think▷|<\|channel\|>analysis<\|message\|>",
    re.IGNORECASE,
)


class RemoteApplication:
    """Sends chat requests to an endpoint, and sends them again if they fail. Thread-safe.

    Attributes:
        context: Of no use: the endpoint has limits of its own.
        usage: Tokens so far, as far as the endpoint reports them.
        failure: Why no further call makes sense; None while one does.
    """

    context = 0

    def __init__(self, model: ModelEndpoint, *, seconds: float) -> None:
        """A call may take so many seconds. Raises EndpointError for a proxy that is no HTTP proxy."""
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0}
        self.failure: EndpointError | None = None
        self._model, self._seconds = model, seconds
        try:
            self._client = model_client(model.base_url, seconds=seconds)
        except ValueError as error:
            raise EndpointError(f"ask {model}", str(error), REFUSALS[404]) from error
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._failures = 0
        self._has_answered = False

    async def chat(self, body: Mapping[str, Any], limits: Limits) -> tuple[int, dict[str, Any]]:
        """Status and body of the response, in the form of vLLM's. Raises TimeoutError if the time is up before it
        has come."""
        asked = {name: value for name, value in body.items() if name not in OF_ENGINE}
        if limits.tokens is not None:
            asked["max_tokens"] = limits.tokens
        if asked.get("model") in (None, BASE_MODEL):
            asked["model"] = self._model.model
        asked["stream"] = False
        async with asyncio.timeout_at(limits.until):
            return await in_daemon_thread(partial(self._answer, json.dumps(asked).encode()))

    def close(self) -> None:
        """Make no further attempt."""
        self._stop.set()
        self._client.close()

    def _answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        attempts = retrying(ATTEMPTS, self._seconds, self._stop)
        try:
            found: dict[str, Any] = attempts(self._attempt, body)
        except CallError as error:
            self._count_failure(error)
            return error.status or 503, {"error": {"message": str(error), "type": "EndpointError", "param": None}}
        with self._lock:
            self._failures, self._has_answered = 0, True
            for name in self.usage:
                count = get_path(found, "usage", name)
                self.usage[name] += count if isinstance(count, int) else 0
        return 200, found

    def _attempt(self, body: bytes) -> dict[str, Any]:
        answer = post_chat(self._client, body, self._model.api_key, httpx2.Response)
        return _in_form_of_vllm(answer.content)

    def _count_failure(self, error: CallError) -> None:
        with self._lock:
            if self._has_answered and error.status in OF_REQUEST:
                return
            self._failures += 1
            hint = None if self._has_answered else REFUSALS.get(error.status)
            if self.failure is not None or not (hint or self._failures >= MOST_FAILURES):
                return
            why = str(error) if hint else f"{self._failures} calls in a row have failed; the last: {error}"
            again = "Start it; the same command then goes on."
            self.failure = EndpointError(f"ask {self._model}", why, hint or again, retryable=hint is None)


def _in_form_of_vllm(body: bytes) -> dict[str, Any]:
    """A response with empty token ids, and with reasoning beside the content. Raises CallError if it is no chat
    completion."""
    try:
        found = json.loads(body)
        choice, *_ = found["choices"]
        message = choice["message"]
        content, calls = message.get("content"), message.get("tool_calls") or []
        if isinstance(content, list):
            # Some endpoints return parts, those of thoughts among them.
            message = {**message, "content": (content := text_of(content))}
        are_calls = all(isinstance(get_path(each, "function", "name"), str) for each in calls)
        if not isinstance(content, str | None) or not are_calls:
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError):
        text = " ".join(body[:300].decode("utf-8", "replace").split())
        raise CallError(f"it answered what is no chat completion: {text}") from None
    message = {"role": "assistant", **{name: value for name, value in message.items() if value is not None}}
    reasoning, text = _split_reasoning(content or "")
    if reasoning:
        message |= {"reasoning": reasoning, "content": text}
    if not calls:
        message.pop("tool_calls", None)
    own = {"token_ids": [], "logprobs": {"content": []}, "finish_reason": choice.get("finish_reason")}
    return {**found, "prompt_token_ids": [], "choices": [{**choice, **own, "message": message}]}


def _split_reasoning(content: str) -> tuple[str, str]:
    """The reasoning and the answer of a content that may begin with reasoning, also without its start marker, which
    some servers send with the prompt. A marker that stands after other text is a quotation."""
    start, end = _REASONING_START.search(content), REASONING_END.search(content)
    begins = start is not None and not content[: start.start()].strip()
    if begins and end is None:
        return content, ""
    return (content[: end.end()], content[end.end() :]) if end and (begins or start is None) else ("", content)


class RemoteEngine(RolloutEngine):
    """Answers tasks by a model at an endpoint: by messages with the task's recorded tools, or by the user's agent."""

    def __init__(self, application: RemoteApplication) -> None:
        super().__init__()
        self._application = application

    async def start(self) -> None:
        await self._endpoint.start()

    async def generate(self, request: RolloutRequest) -> Completion:
        """One rollout. Raises EndpointError if the endpoint answers no more."""
        is_of_program = request.prompt.task.agent == "program"
        completion = await (self._with_program(request) if is_of_program else self._with_recorded_tools(request))
        if completion.error and self._application.failure is not None:
            raise self._application.failure
        return completion

    async def stop(self) -> None:
        self._application.close()
        await super().stop()


class LocalCalls:
    """Calls of engines in the event loop of a thread of this process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def submit(self, engine: RemoteEngine, request: RolloutRequest) -> Future[Completion]:
        return asyncio.run_coroutine_threadsafe(engine.generate(request), self._loop)

    def ended(self, calls: Sequence[Future[Completion]], *, seconds: float) -> list[Future[Completion]]:
        return list(futures.wait(calls, seconds, futures.FIRST_COMPLETED).done)

    def completion(self, call: Future[Completion]) -> Completion:
        """Raises FlywheelError."""
        try:
            return call.result()
        except FlywheelError:
            raise
        except Exception as error:
            log.exception("one answer failed")
            return Completion(error=f"it failed: {type(error).__name__}: {error}")

    def cancel(self, call: Future[Completion]) -> None:
        call.cancel()


@contextlib.contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, which ends with the context. What still runs in it is cancelled."""

    async def cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="endpoint-loop", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
