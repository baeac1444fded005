"""One rollout's calls of the model: forces how they are sampled, and records their tokens.

The client is an agent, or the loop of recorded tools. It receives what the server would return to it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import TrainError
from flywheel.records.program_run import CallFault
from flywheel.training.data.prompts import seed_of
from flywheel.training.data.rollout import LoadedAdapter
from flywheel.training.data.samples import CallTokens, digest, identity_of, message_identity
from flywheel.training.engine.served_application import BASE_MODEL, TIME_UP, Limits, ServedApplication

PASSED: Final = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs",
    "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "reasoning_effort", "chat_template_kwargs", "documents", "add_generation_prompt",
    "continue_final_message", "echo", "skip_special_tokens", "spaces_between_special_tokens", "top_logprobs",
)  # fmt: skip
"""What a client decides about its requests. The rest, with all sampling, is the rollout's."""
POLICY_SAMPLING: Final[Mapping[str, float]] = MappingProxyType(
    {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
)
"""Parameters of rollouts to learn from, whatever the server's defaults are: the logprobs are then the policy's."""
OF_REQUEST: Final = (400, 413, 422)
"""Statuses that concern one request, such as a prompt that is too long. Others but 200 are errors of the engine."""
NO_LOGPROB: Final = -9999.0
"""vLLM's chat endpoint returns this for a logprob of minus infinity."""


@dataclass(frozen=True, slots=True)
class SessionReply:
    """The response to a request: what the server would return, or its error. `is_beyond_limit`: a limit of the
    rollout refused the request."""

    status: int
    body: dict[str, Any]
    is_beyond_limit: bool = False

    @property
    def error(self) -> str:
        """The server's message; empty if the request succeeded."""
        if self.status == 200:
            return ""
        error = self.body.get("error")
        return str(error.get("message") if isinstance(error, Mapping) else error)

    @property
    def is_too_long(self) -> bool:
        """Whether the prompt leaves no room in the context."""
        error = self.body.get("error")
        return (
            self.status == 400 and isinstance(error, Mapping) and error.get("param") in ("input_tokens", "input_text")
        )


@dataclass(slots=True, eq=False)
class _Unanswered:
    """What was asked, and what it is if no answer comes. `waiting` clients have not received the reply."""

    key: str
    fault: CallFault = "abandoned_call"
    why: str = "it was given up before the engine had answered"
    waiting: int = 0


@dataclass(slots=True, eq=False)
class _CallInFlight(_Unanswered):
    """A call that was answered, is in flight, or waits for others in flight."""

    task: asyncio.Task[SessionReply] = field(kw_only=True)
    is_delivered: bool = False
    is_retried: bool = False

    @property
    def may_answer(self) -> bool:
        """Whether it has an answer, or may have one later."""
        return not self.task.done() or (self.reply is not None and self.reply.status == 200)

    @property
    def reply(self) -> SessionReply | None:
        """None as long as there is none, and if the engine died."""
        is_answered = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if is_answered else None

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed to answer it."""
        return self.task.done() and (self.reply is None or self.reply.status not in (200, *OF_REQUEST))

    @property
    def was_left(self) -> bool:
        """Whether its clients left before they received the reply."""
        return not (self.waiting or self.is_delivered)


class Session:
    """One rollout. All its calls use the same adapter, except those of `frozen` models, which are not recorded and
    have no limit.

    Attributes:
        models: The names of its models; the first is the one that is trained.
        generated: Number of generated tokens of all calls.
        is_truncated: Whether a limit of the rollout refused a call or cut a message.
        is_full: Whether the last prompt left no room in the context.
    """

    def __init__(
        self,
        app: ServedApplication,
        adapter: LoadedAdapter | None,
        *,
        as_served: bool,
        temperature: float | None,
        seed: int,
        context: int,
        texts: Callable[[Sequence[int]], Sequence[str]] | None = None,
        tokens: int | None = None,
        turns: int | None = None,
        turn_tokens: int | None = None,
        seconds: float | None = None,
        model: str = "policy",
        frozen: Mapping[str, LoadedAdapter | None] | None = None,
    ) -> None:
        """A rollout `as_served` has the server's defaults of sampling, also its temperature if `temperature` is None.
        `texts` gives the text of each token of a prompt. At most `tokens` are generated in at most `turns` calls,
        and at most `turn_tokens` in each; this holds for calls at the same time as well, of which each reserves a
        turn and tokens. After `seconds`, messages are cut (`Limits`). `model` is the name that the client sees,
        unless it uses another one. `frozen` are models that answer by their names, as the server does; None is the
        base model."""
        self.generated = 0
        self.is_truncated = False
        self.is_full = False
        self._frozen = frozen or {}
        self.models = (model, *self._frozen)
        self._app, self._context, self._texts = app, context, texts
        self._tokens, self._turns, self._turn_tokens = tokens, turns, turn_tokens
        self._until = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._seed, self._numbers = seed, itertools.count()
        self._as_served = as_served
        self._forced: dict[str, Any] = {} if as_served else dict(POLICY_SAMPLING)
        if temperature is not None:
            self._forced["temperature"] = temperature
        self._forced["model"] = _name(adapter)
        self._recorded: list[CallTokens] = []
        self._calls: list[_CallInFlight] = []
        self._reserved: list[int] = []
        """The tokens of each call in flight; 0 without a limit of tokens."""
        self._queue, self._given_back = asyncio.Lock(), asyncio.Event()
        self._unanswered: list[_Unanswered] = []
        self._is_closed = False

    @property
    def calls(self) -> tuple[CallTokens, ...]:
        """The answered calls, in the order of their answers, with the texts of their prompts."""
        texts = self._texts
        if texts is None:
            return tuple(self._recorded)
        return tuple(replace(call, prompt_texts=tuple(texts(call.prompt_ids))) for call in self._recorded)

    @property
    def fault(self) -> tuple[CallFault, str] | None:
        """What became of a request that no client has an answer to, not by a later retry either: in a word, and in a
        sentence. None if there is none. An error of the engine comes before what a client gave up. What a limit
        refused is no fault, also if nobody waited for it."""
        refused = {call for call in self._calls if call.reply is not None and call.reply.is_beyond_limit}
        unanswered = (each for each in self._unanswered if each not in refused)
        found = min(unanswered, key=lambda each: each.fault == "abandoned_call", default=None)
        return None if found is None else (found.fault, found.why)

    def stream(self, body: Mapping[str, Any]) -> Callable[[], None]:
        """The reply of this request is being streamed, until what this returns is called."""
        streamed = _Unanswered(digest(body), "broken_stream", "its answer broke off as it was streamed")
        self._unanswered.append(streamed)
        return lambda: self._answer(streamed)

    def elsewhere(self, body: Mapping[str, Any]) -> Callable[[str], None]:
        """Another model is asked this, until what this returns is called: with why that failed, or an empty text."""
        asked = _Unanswered(digest(body))
        earlier = [each for each in self._unanswered if each.key == asked.key and not each.waiting]
        self._unanswered.append(asked)

        def ended(failure: str) -> None:
            if failure:
                asked.fault, asked.why = "engine_error", failure
            else:
                self._answer(asked, *earlier)

        return ended

    async def complete(self, body: Mapping[str, Any], *, attempt: int | None = None) -> SessionReply:
        """The response to a chat request.

        A client's retry has the reply of its first attempt, and is no call of its own; if the engine failed to answer
        that, it is made anew. `attempt` is the number of retries of this request, if the client counts them; above 0
        it is a retry. So is a request that equals one whose client left. All others are calls of their own, which
        wait while calls in flight have reserved what they want of the rollout's limits. When the caller is cancelled,
        the call goes on until `close`.

        Raises vLLM's EngineDeadError if the engine is dead, and TimeoutError if the rollout's time was up before the
        first token.
        """
        if self._is_closed:
            return refusal(410, "this rollout has ended", "Gone")
        key = digest(body)
        call, earlier = self._retried(key, attempt), self._left(key)
        if call is None:
            call = _CallInFlight(key, task=asyncio.ensure_future(self._call(body)))
            self._calls.append(call)
            self._unanswered.append(call)
        call.waiting += 1
        try:
            reply = await asyncio.shield(call.task)
        except asyncio.CancelledError:
            if call.task.cancelled():
                return refusal(410, "this rollout has ended", "Gone")
            raise
        except Exception as error:
            call.fault, call.why = "engine_error", f"the engine failed: {error}"
            raise
        finally:
            call.waiting -= 1
        call.is_delivered = True
        if reply.is_beyond_limit:
            self._answer(call)
        elif reply.status in (200, *OF_REQUEST):
            # That a client left may be known only after its retry has come.
            self._answer(call, *earlier, *(self._left(key) if attempt else ()))
        else:
            call.fault, call.why = "engine_error", f"the engine failed: {reply.error} (HTTP status {reply.status})"
        return reply

    def close(self) -> None:
        """End the rollout: calls in flight are aborted, and later requests refused."""
        self._is_closed = True
        for call in self._calls:
            call.task.cancel()

    def _answer(self, *answered: _Unanswered) -> None:
        self._unanswered = [each for each in self._unanswered if each not in answered]

    def _left(self, key: str) -> list[_Unanswered]:
        """Equal requests without an answer for which no client waits."""
        return [each for each in self._unanswered if each.key == key and not each.waiting]

    def _retried(self, key: str, attempt: int | None) -> _CallInFlight | None:
        """The call of which a request is a retry: of equal ones, first one that was left, then the last one. None if
        it is none, or the retry of a call that failed, which is made anew."""
        equal = [call for call in self._calls if call.key == key]
        answers = [call for call in equal if call.may_answer]
        left = next((call for call in answers if call.was_left), None)
        if left is not None or not attempt:
            return left
        failed = next((call for call in equal if call.has_failed and not call.is_retried), None)
        if failed is not None:
            failed.is_retried = True
            return None
        return answers[-1] if answers else None

    def _is_frozen(self, body: Mapping[str, Any]) -> bool:
        name = body.get("model")
        return isinstance(name, str) and name in self._frozen

    def _as_deployed(self, name: str) -> dict[str, Any]:
        forced: dict[str, Any] = {"model": _name(self._frozen[name])}
        if self._as_served and "temperature" in self._forced:
            forced["temperature"] = self._forced["temperature"]
        return forced

    def _limit_reached(self) -> str:
        """The limit that leaves nothing for a further call, in words; empty if there is none."""
        if self._turns is not None and len(self._recorded) >= self._turns:
            return f"{self._turns} calls of the model"
        if self._tokens is not None and self.generated >= self._tokens:
            return f"{self._tokens} generated tokens"
        return ""

    def _has_room(self, body: Mapping[str, Any]) -> bool:
        """Whether the limits have a turn and all tokens that a call wants, beside what is reserved."""
        if self._turns is not None and len(self._recorded) + len(self._reserved) >= self._turns:
            return False
        if self._tokens is None:
            return True
        left = self._tokens - self.generated
        return left - sum(self._reserved) >= min(filter(None, (left, self._turn_tokens, _asked_tokens(body))))

    @asynccontextmanager
    async def _limits(self, body: Mapping[str, Any]) -> AsyncIterator[Limits]:
        """The limits of a call, which has a turn and its tokens reserved while it is in flight. Waits as long as
        calls in flight may give back what it wants. Raises _BeyondLimitError."""
        async with self._queue:  # first come, first served
            while self._reserved and not self._limit_reached() and not self._has_room(body):
                self._given_back.clear()
                await self._given_back.wait()
            if reached := self._limit_reached():
                self.is_truncated = True
                raise _BeyondLimitError(f"this rollout has reached its limit of {reached}")
            bounds = [] if self._turn_tokens is None else [self._turn_tokens]
            if self._tokens is not None:
                bounds.append(self._tokens - self.generated - sum(self._reserved))
            limits = Limits(self._context, min(bounds, default=None), self._as_served, self._until)
            reserved = 0 if self._tokens is None else min(*bounds, _asked_tokens(body) or bounds[-1])
            self._reserved.append(reserved)
        try:
            yield limits
        finally:
            self._reserved.remove(reserved)
            self._given_back.set()

    async def _call(self, body: Mapping[str, Any]) -> SessionReply:
        if self._is_frozen(body):
            status, answer = await self._ask(body, self._as_deployed(body["model"]), Limits(self._app.context))
        else:
            try:
                async with self._limits(body) as limits:
                    status, answer = await self._ask(body, self._forced, limits)
                    if status == 200:
                        self._record(body, answer)
                        self.is_truncated |= self._is_cut(body, limits)
            except _BeyondLimitError as reason:
                return replace(refusal(400, str(reason), "BadRequestError"), is_beyond_limit=True)
        reply = SessionReply(status, self._stripped(body, answer) if status == 200 else answer)
        if not self._is_frozen(body):
            self.is_full = reply.is_too_long
        return reply

    async def _ask(
        self, body: Mapping[str, Any], forced: Mapping[str, Any], limits: Limits
    ) -> tuple[int, dict[str, Any]]:
        request = {name: body[name] for name in PASSED if body.get(name) is not None}
        request |= {
            **forced,
            "n": 1,
            "stream": False,
            "seed": seed_of(self._seed, next(self._numbers)),
            "logprobs": True,
            "return_token_ids": True,
            # Without its reasoning, vLLM returns no tokens either.
            "include_reasoning": True,
        }
        if not body.get("logprobs"):
            request.pop("top_logprobs", None)
        return await self._app.chat(request, limits)

    def _is_cut(self, body: Mapping[str, Any], limits: Limits) -> bool:
        """Whether a limit of the rollout or the server ended the last recorded message. One that the client asked
        for, below these, is its own matter."""
        call = self._recorded[-1]
        if call.finish_reason == TIME_UP:
            return True
        is_asked = any(body.get(name) is not None for name in ("max_tokens", "max_completion_tokens"))
        if not limits.context:  # neither it nor the tokens of a server elsewhere are known
            return call.finish_reason == "length" and not is_asked
        room = min(limits.context - len(call.prompt_ids), limits.context if limits.tokens is None else limits.tokens)
        return call.finish_reason == "length" and (not is_asked or len(call.token_ids) >= room)

    def _record(self, body: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        [choice] = answer["choices"]
        prompt, tokens, logprobs = answer.get("prompt_token_ids"), choice.get("token_ids"), choice.get("logprobs")
        if prompt is None or tokens is None or logprobs is None or len(logprobs["content"]) != len(tokens):
            raise TrainError(
                "record a call of the model",
                "vLLM's response has not all token ids and logprobs",
                "Check the installed version of vLLM.",
            )
        drawn = logprobs["content"]
        known = (each["logprob"] if each["logprob"] > NO_LOGPROB else None for each in drawn)
        self.generated += len(tokens)
        self._recorded.append(
            CallTokens(
                prompt_ids=tuple(prompt),
                token_ids=tuple(tokens),
                logprobs=tuple(known),
                texts=tuple(each["token"] for each in drawn),
                identity=identity_of(body),
                reply=message_identity(choice["message"]),
                finish_reason=choice["finish_reason"] or "",
                messages=tuple(body["messages"]),
                answer=dict(choice["message"]),
            )
        )

    def _stripped(self, body: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """The response without what the client did not ask for."""
        [choice] = answer["choices"]
        answer["model"] = body.get("model") or self.models[0]
        if not body.get("return_token_ids"):
            answer.pop("prompt_token_ids")
            choice.pop("token_ids")
        if not body.get("logprobs"):
            choice["logprobs"] = None
        if body.get("include_reasoning") is False:
            choice["message"].pop("reasoning", None)
        return answer


class _BeyondLimitError(Exception):
    """A limit of the rollout leaves nothing for a call."""


def _asked_tokens(body: Mapping[str, Any]) -> int | None:
    """The most that a client wants to be generated; None if it does not say, or what the server refuses."""
    asked = body.get("max_completion_tokens")
    if asked is None:
        asked = body.get("max_tokens")
    return asked if isinstance(asked, int) and asked > 0 else None


def _name(adapter: LoadedAdapter | None) -> str:
    return BASE_MODEL if adapter is None else adapter.name


def refusal(status: int, message: str, kind: str) -> SessionReply:
    """An error as the server writes it."""
    return SessionReply(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})
