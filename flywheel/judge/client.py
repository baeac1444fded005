"""The judge as somebody to ask: by the best means that its endpoint has, and the backup while it is away."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_random_exponential,
)

from flywheel.config import JudgeSettings
from flywheel.errors import JudgeError
from flywheel.judge.rate_limit import ConcurrencyLimit, Key, KeyPool, RateLimiter
from flywheel.judge.response import TOOL_NAME, CallError, Reply, read_answer
from flywheel.judge.response_formats import (
    MAX_TOKENS,
    SEED,
    SYSTEM,
    TEMPERATURE,
    EndpointCapabilities,
    ResponseFormat,
    in_request,
    names,
)
from flywheel.model_http_client import (
    HttpAnswer,
    ModelHttpClient,
    RequestFailedError,
    ResponseTooLargeError,
    is_http_url,
)
from flywheel.rubric import ALIEN, Rubric
from flywheel.trace import ChatMessage

log = logging.getLogger(__name__)

NEVER: Final = threading.Event()
"""The stop that does not come."""
AWAY_SECONDS: Final = 60.0
"""How long the backup is asked first after the judge failed."""
UNTOLD: Final = frozenset({400, 422})
"""Answers that may be about how we asked, whatever they say."""
NOT_TAKEN: Final = UNTOLD | {404, 405, 415}
"""Answers that are about how we asked if they name it."""


def judge_of(rubric: Rubric, settings: JudgeSettings) -> JudgeSettings:
    """The judge that a rubric is judged by: the one of the configuration, or another model at its endpoint."""
    named = rubric.judge.model
    return settings if named == ALIEN else settings.model_copy(update={"model": named})


def judges(settings: JudgeSettings) -> list[EndpointConfig]:
    """The endpoints in the order in which they are asked: the judge, then its backup."""
    url = (settings.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
    asked = [EndpointConfig(settings.model, url, settings.api_key_env)]
    if backup := settings.backup:
        url = (backup.base_url or url).rstrip("/")
        asked.append(EndpointConfig(backup.model or settings.model, url, backup.api_key_env, "judge.backup"))
    return asked


class JudgeClient:
    """Asks the judge. Thread-safe; `learned` remembers what its endpoints turned out not to do."""

    def __init__(
        self,
        settings: JudgeSettings,
        learned: EndpointCapabilities | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.learned = learned or EndpointCapabilities()
        self._endpoints = [Endpoint(who, settings) for who in judges(settings)]
        self.base_url = self._endpoints[0].who.base_url
        self._clock = clock
        self._away_until = float("-inf")

    @property
    def identity(self) -> str:
        """What answers: a verdict of another model is another verdict."""
        return "\0".join(f"{endpoint.who.base_url}\0{endpoint.who.model}" for endpoint in self._endpoints)

    def ask(
        self,
        messages: list[ChatMessage],
        *,
        response_format: dict[str, Any],
        temperature: float,
        max_tokens: int,
        seed: int | None = None,
        stop: threading.Event = NEVER,
    ) -> Reply:
        """One answer; when the endpoint does not take just this call, a Reply with a problem.

        Raises JudgeError: retryable when the endpoint failed at every attempt (`stop` ends the attempts), not
        retryable when it refuses us.
        """
        wanted: dict[str, Any] = {"messages": messages, "temperature": temperature, "max_tokens": max_tokens}
        if seed is not None:
            wanted["seed"] = seed
        first: JudgeError | None = None
        for endpoint in self._in_order():
            try:
                return self._ask(endpoint, wanted, response_format, stop)
            except JudgeError as error:
                if len(self._endpoints) == 1 or stop.is_set():
                    raise
                if endpoint is self._endpoints[0]:
                    self._away_until = self._clock() + AWAY_SECONDS
                    log.warning("%s", error)
                first = error if first is None or endpoint is self._endpoints[0] else first
        assert first is not None
        raise first

    def ignored(self, reply: Reply) -> bool:
        """The reply did not come as it was asked for: the next is asked for by other means, if there are any left."""
        endpoint = next((each for each in self._endpoints if str(each.who) == reply.judge), None)
        if endpoint is None or reply.means is ResponseFormat.TEXT:
            return False
        self._note(endpoint, reply.means, "ignores")
        return True

    def _in_order(self) -> Iterator[Endpoint]:
        away = self._clock() < self._away_until
        yield from reversed(self._endpoints) if away else self._endpoints

    def _ask(
        self, endpoint: Endpoint, wanted: dict[str, Any], response_format: dict[str, Any], stop: threading.Event
    ) -> Reply:
        """By the best means that is left. A refusal that names one is learned; after any other, words are tried."""
        left = self.learned.means(str(endpoint.who))
        suspected: ResponseFormat | None = None
        while True:
            means = left.pop(0)
            try:
                reply = self._call(endpoint, {**wanted, **_form(means, response_format)}, stop)
            except CallError as error:
                named = _is_refusal(error.status, NOT_TAKEN) and names(error.said, means, error.status)
                about_us = named or (error.status in UNTOLD and not THIS_CALL.search(error.said))
                if means is ResponseFormat.TEXT or not about_us:
                    return endpoint.refused(error)
                if named:
                    self._note(endpoint, means, "takes no")
                else:
                    left, suspected = [ResponseFormat.TEXT], means
                continue
            if suspected is not None:
                self._note(endpoint, suspected, "takes no")
            return replace(reply, means=means)

    def _call(self, endpoint: Endpoint, wanted: dict[str, Any], stop: threading.Event) -> Reply:
        """One request, without the parameters that the endpoint does not know."""
        while True:
            sent = self._known_to(endpoint, wanted)
            try:
                return endpoint.call(sent, stop)
            except CallError as error:
                known = (each for each in in_request(sent) if each in _PARAMETERS)
                unknown = next((each for each in known if names(error.said, each, error.status)), None)
                if unknown is None or not _is_refusal(error.status, UNTOLD):
                    raise
                self._note(endpoint, unknown, "takes no")

    def _known_to(self, endpoint: Endpoint, wanted: dict[str, Any]) -> dict[str, Any]:
        sent = dict(wanted)
        for parameter in (SEED, TEMPERATURE):
            if self.learned.lacks(str(endpoint.who), parameter):
                sent.pop(parameter, None)
        if self.learned.lacks(str(endpoint.who), SYSTEM):
            sent["messages"] = _without_system(sent["messages"])
        if self.learned.lacks(str(endpoint.who), MAX_TOKENS):
            sent["max_completion_tokens"] = sent.pop(MAX_TOKENS)
        return sent

    def _note(self, endpoint: Endpoint, what: str, does: str) -> None:
        if self.learned.note(str(endpoint.who), what):
            log.info("%s %s %s: it is asked without from now on", endpoint.who, does, _NAMES[what])

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()


_PARAMETERS: Final = (SEED, TEMPERATURE, MAX_TOKENS, SYSTEM)
_NAMES: Final = {
    ResponseFormat.SCHEMA: "JSON schema",
    ResponseFormat.TOOL: "tool call",
    SEED: "seed",
    TEMPERATURE: "temperature",
    MAX_TOKENS: "max_tokens",
    SYSTEM: "system message",
}


def _is_refusal(status: int, statuses: frozenset[int]) -> bool:
    return status in statuses or status >= 500


def _without_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The same messages as one of the user."""
    return [{"role": "user", "content": "\n\n".join(str(message["content"]) for message in messages)}]


def _form(means: ResponseFormat, response_format: dict[str, Any]) -> dict[str, Any]:
    """The part of a request that asks for the reply's form."""
    if means is ResponseFormat.SCHEMA:
        return {"response_format": response_format}
    if means is ResponseFormat.TEXT:
        return {}
    parameters = response_format["json_schema"]["schema"]
    function = {"name": TOOL_NAME, "description": "Give the verdict.", "parameters": parameters, "strict": True}
    return {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": TOOL_NAME}},
    }


OPENAI_URL: Final = "https://api.openai.com/v1"
KEY_REFUSED: Final = frozenset({401, 402, 403})
FATAL: Final = {
    401: "Put the right key into the environment variable {key} ({section}.api_key_env names it).",
    402: "Fill up the account of the key in the environment variable {key}, or set another {section}.base_url.",
    403: "Use a key with access to this model ({section}.api_key_env names the variable {key}), or another "
    "{section}.model.",
    404: "Check {section}.model and {section}.base_url.",
}
"""Answers that every other call would get too, with the setting to change."""
REFUSED: Final = (
    "Check {section}.model, judge.temperature and judge.max_tokens, and that {section}.base_url is the API's root."
)
THIS_TEXT: Final = re.compile(r"moderat|flagged|content.?(filter|polic|manag)", re.I)
"""What endpoints say of a text that they do not want to see, also where they answer as to a wrong key."""
THIS_CALL: Final = re.compile(rf"context|too (long|large|many)|maximum|length|exceed|token|{THIS_TEXT.pattern}", re.I)
"""What they say when it is this exchange that they do not take: its length, or what stands in it."""
THE_LIMIT: Final = re.compile(r"\bmax_\w*tokens\b.{0,40}(large|most|less|between|exceed)(?!.*context)", re.I)
"""What they say of an answer's length that the model cannot have, whatever it is asked."""
COMPLETION_GUESS: Final = 200.0
"""Tokens of a reply before any was seen."""

# Full jitter up to a doubling bound: many threads that failed together do not come back together.
_backoff = wait_random_exponential(multiplier=0.5, max=20)


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """A model at an endpoint, and the section of the configuration that names it."""

    model: str
    base_url: str
    api_key_env: str
    section: str = "judge"

    def __str__(self) -> str:
        return f"{self.model} at {self.base_url}"


class Endpoint:
    """Thread-safe. `has_answered` is set once it took a call: it is set up well enough, then."""

    def __init__(self, who: EndpointConfig, settings: JudgeSettings) -> None:
        self.who = who
        self.has_answered = False
        self.in_flight = ConcurrencyLimit(settings.max_thread)
        self._settings = settings
        self._requests = RateLimiter(settings.requests_per_minute)
        self._tokens = RateLimiter(settings.tokens_per_minute)
        self._mean_completion = COMPLETION_GUESS
        self._usage_missed = False
        self._making = threading.Lock()
        self._keys: KeyPool | None = None
        self._transport: ModelHttpClient | None = None

    def call(self, wanted: Mapping[str, Any], stop: threading.Event) -> Reply:
        """The reply to one request, which was tried as often as the settings allow.

        Raises CallError when the endpoint does not take this call, and JudgeError: retryable when it failed at every
        attempt (`stop` ends them), not retryable when no other call would fare better.
        """
        body = orjson.dumps({"model": self.who.model, **wanted})
        try:
            try:
                return self._once(body, stop)
            except CallError as error:
                if not error.can_pass or _names_a_part(error, wanted):
                    raise
                return self._again(error, body, stop)
        except CallError as error:
            if error.status and (not error.can_pass or _names_a_part(error, wanted)):
                raise
            raise self._unreachable(error.said) from error

    def _again(self, first: CallError, body: bytes, stop: threading.Event) -> Reply:
        """The attempts after the first. Most calls have none: they do without what retrying costs."""
        attempts = stop_after_attempt(self._settings.max_attempts)
        retrying = Retrying(
            stop=lambda state: attempts(state) or stop_when_event_set(stop)(state) or self._must_wait_too_long(state),
            wait=self._wait,
            sleep=sleep_using_event(stop),
            retry=retry_if_exception(lambda error: isinstance(error, CallError) and error.can_pass),
            reraise=True,
        )
        failed = [first]

        def attempt() -> Reply:
            if failed:
                raise failed.pop()
            return self._once(body, stop)

        return retrying(attempt)

    def listings(self) -> list[HttpAnswer]:
        """What it answers when it is asked for its models, which costs nothing: without a key, and by each key.

        Raises JudgeError where nobody answers.
        """
        keys, transport = self._connected()
        try:
            return [transport.get("/models", key) for key in ("", *(each.secret for each in keys))]
        except (RequestFailedError, ResponseTooLargeError) as error:
            raise self._unreachable(str(error)) from error

    def refused(self, error: CallError) -> Reply:
        """A call that the endpoint did not take: this one's fault, or raised as everybody's."""
        hint = None if error.status == 403 and THIS_TEXT.search(error.said) else FATAL.get(error.status)
        this_call = error.status == 413 or (THIS_CALL.search(error.said) and not THE_LIMIT.search(error.said))
        # An endpoint that has answered others is set up well enough; one long task must not stop the rest.
        if hint is None and (self.has_answered or this_call):
            return Reply("", f"the endpoint refused this call: {error.said}", calls=0, judge=str(self.who))
        raise self._error(error.said, hint or REFUSED) from error

    def _once(self, body: bytes, stop: threading.Event) -> Reply:
        """One attempt, with as many keys as it takes to find one that works."""
        keys, transport = self._connected()
        for left in reversed(range(len(keys))):
            key = self._next_key(keys, stop)
            try:
                return self._ask(transport, keys, key, body, stop)
            except CallError as error:
                refused = error.status in KEY_REFUSED and not THIS_TEXT.search(error.said)
                if refused and not keys.refuse(key, error.said) and len(keys) > 1:
                    said = f"{error.said}, and so for each of {len(keys)} keys"
                    raise CallError(said, status=error.status) from error
                if not left or not (refused or error.status == 429):
                    raise
                log.warning("key %d of %d for %s rests: %s", key.place, len(keys), self.who, error.said)
        raise AssertionError("a pool has a key")

    def _ask(self, transport: ModelHttpClient, keys: KeyPool, key: Key, body: bytes, stop: threading.Event) -> Reply:
        place = self.in_flight.enter(stop)
        if place is None:
            raise CallError("judging stops", final=True)
        throttled: bool | None = None
        try:
            expected = len(body) / 4 + self._mean_completion
            wait = max(self._requests.reserve(), self._tokens.reserve(expected))
            if wait and stop.wait(wait):
                raise CallError("judging stops", final=True)
            try:
                answer = transport.post("/chat/completions", body, key.secret)
                reply = read_answer(answer)
            except CallError as error:
                self._tokens.correct(-expected)
                throttled = error.status == 429 or error.retry_after is not None or None
                if throttled:
                    keys.slow(key, error.retry_after)
                raise
            except ResponseTooLargeError as error:
                reply = Reply("", str(error))
            except RequestFailedError as error:
                self._tokens.correct(-expected)
                raise CallError(str(error)) from error
            throttled = False
            self._account(reply, expected)
        finally:
            self.in_flight.leave(place, throttled=throttled)
        keys.worked(key)
        return replace(reply, judge=str(self.who))

    def _account(self, reply: Reply, expected: float) -> None:
        self.has_answered = True
        if reply.tells_usage:
            self._mean_completion += 0.1 * (reply.completion_tokens - self._mean_completion)
            self._tokens.correct(reply.prompt_tokens + reply.completion_tokens - expected)
        elif not self._usage_missed:
            self._usage_missed = True
            log.warning("%s does not tell what its calls cost: tokens are counted as 0", self.who.base_url)

    def _next_key(self, keys: KeyPool, stop: threading.Event) -> Key:
        """A key that does not rest, after a wait if need be."""
        while (key := keys.take()) is None:
            if refusal := keys.refusal():
                raise CallError(refusal, status=401)
            wait = keys.seconds_to_wait()
            if wait > self._settings.timeout_seconds:
                raise CallError(f"it asked to be left alone for {wait:.0f} s", final=True)
            if stop.wait(wait):
                raise CallError("judging stops", final=True)
        return key

    def _wait(self, state: RetryCallState) -> float:
        asked = _retry_after(state)
        return _backoff(state) if asked is None else asked

    def _must_wait_too_long(self, state: RetryCallState) -> bool:
        asked = _retry_after(state)
        return asked is not None and asked > self._settings.timeout_seconds

    def _connected(self) -> tuple[KeyPool, ModelHttpClient]:
        if self._keys is None or self._transport is None:
            with self._making:
                self._check_url()
                self._keys = self._keys or KeyPool(self._secrets())
                try:
                    self._transport = self._transport or ModelHttpClient(
                        self.who.base_url, timeout_seconds=self._settings.timeout_seconds
                    )
                except ValueError as error:
                    raise self._error(str(error), "Correct HTTPS_PROXY and HTTP_PROXY, or unset them.") from error
        return self._keys, self._transport

    def _check_url(self) -> None:
        if not is_http_url(self.who.base_url):
            raise JudgeError(
                f"ask the judge {self.who.model}",
                f"its endpoint {self.who.base_url} is no URL",
                f"Set {self.who.section}.base_url (or OPENAI_BASE_URL) to something like http://127.0.0.1:8000/v1.",
            )

    def _secrets(self) -> list[str]:
        name = self.who.api_key_env
        keys = [key.strip() for key in os.environ.get(name, "").split("|") if key.strip()]
        if keys and all(key.isascii() and key.isprintable() for key in keys):
            return keys
        if not keys and self.who.base_url != OPENAI_URL:
            return ["none"]  # most servers of one's own want none; one that does will say so
        raise JudgeError(
            f"ask the judge {self.who.model}",
            f"the environment variable {name} with its key "
            f"{'holds characters that no key has' if keys else 'is not set'}",
            f"Set it, or name another one in {self.who.section}.api_key_env, or another endpoint in "
            f"{self.who.section}.base_url.",
        )

    def _unreachable(self, why: str) -> JudgeError:
        return self._error(
            why,
            "Check {section}.base_url and that the endpoint runs; nothing is lost, the tasks are asked again later.",
            retryable=True,
        )

    def _error(self, why: str, hint: str, *, retryable: bool = False) -> JudgeError:
        told = hint.format(key=self.who.api_key_env, section=self.who.section)
        return JudgeError(f"ask the judge {self.who}", why, told, retryable=retryable)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _names_a_part(error: CallError, sent: Mapping[str, Any]) -> bool:
    """Whether a server broke on a part of the request, and says so: it would again, and not without that part."""
    return error.status >= 500 and any(names(error.said, part, error.status) for part in in_request(sent))


def _retry_after(state: RetryCallState) -> float | None:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after if isinstance(error, CallError) else None
