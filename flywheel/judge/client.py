"""Client for the judge: calls with retries, API keys and limits, and failover to the backup.

`JudgeClient` asks the judge in the strictest response format that it supports, or its backup while the judge fails.
`JudgeEndpoint` makes the calls to one model: retries, keys, limits, and errors that name the setting to change.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

import orjson
from tenacity import RetryCallState

from flywheel.config.judge import JudgeSettings
from flywheel.errors import ConfigError, JudgeError
from flywheel.judge.call_seconds import CALL_SECONDS
from flywheel.judge.chat_completions import (
    FIELDS,
    KNOWN,
    LABELS,
    MOVED,
    SEED,
    TEMPERATURE,
    EndpointCapabilities,
    JudgeReply,
    ResponseFormat,
    is_rejection_of,
    mended,
    part_of_param,
    reply_of,
    request_parts,
    says_unsupported,
)
from flywheel.judge.limits import KEY_REJECTED, MODERATION, ConcurrencyLimit, Key, KeyPool, RateLimiter
from flywheel.judge.rubric.rubric import ALIEN, Rubric
from flywheel.records.trace import ChatMessage
from flywheel.secrets import keys_in
from flywheel.system.heartbeat import beat
from flywheel.system.http_client import (
    NEVER,
    OPENAI_URL,
    CallError,
    authorization,
    call_errors,
    endpoint_url,
    model_client,
    post_chat,
    retrying,
)

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)

FAILOVER_SECONDS: Final = 60.0
"""How long the backup is asked first after the judge failed."""
BAD_REQUEST: Final = frozenset({400, 422})
"""Status codes that can concern the format of the request, whatever the message says."""
UNSUPPORTED: Final = BAD_REQUEST | {404, 405, 415}
"""Status codes that concern the response format if the message names it."""
UNDECIDED: Final = frozenset({0, 408, 429, 503})
"""Status codes that say nothing about what was sent; 0 is that of a timeout."""
SHORT_QUESTION: Final[list[ChatMessage]] = [{"role": "user", "content": "Is 2 plus 2 equal to 4? Reply in JSON."}]
"""What is asked to find out whether a part of a request is supported."""
HINTS: Final = {
    401: "Put the right key into the environment variable {key} ({section}.api_key_env names it).",
    402: "Add credit to the account of the key in the environment variable {key}, or set another {section}.base_url.",
    403: "Use a key with access to this model ({section}.api_key_env names the variable {key}), or another "
    "{section}.model.",
    404: "Check {section}.model and {section}.base_url.",
}
"""The setting to change, by status codes that every other call would get too."""
REJECTED_HINT: Final = (
    "Check {section}.model, judge.response_format, judge.temperature and judge.max_tokens, and that"
    " {section}.base_url is the API's root."
)
THIS_CALL: Final = re.compile(
    rf"context|too (long|large|many)|maximum|length|exceed|token|{MODERATION.pattern}", re.I
)
"""The endpoint rejects this exchange: its length or its content."""
OUTPUT_LIMIT: Final = re.compile(r"\bmax_\w*tokens\b.{0,40}(large|most|less|between|exceed)(?!.*context)", re.I)
"""The endpoint rejects the maximum length of a reply, whatever the exchange is."""
COMPLETION_TOKENS: Final = 200.0
"""Expected tokens of a reply before any was received."""
Outcome: TypeAlias = tuple[int, str]
"""Status and code of an answer."""
ANSWERED: Final[Outcome] = (200, "")


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """A model at an endpoint, and the section of the configuration that names it."""

    model: str
    base_url: str
    api_key_env: str
    section: str = "judge"

    def __str__(self) -> str:
        return f"{self.model} at {self.base_url}"

    def require(self) -> None:
        """Raises ConfigError where the settings do not say which model to ask, or where: nothing is sent to a
        default."""
        given = {"judge.base_url": self.base_url, "judge.model": self.model}
        if missing := [key for key, value in given.items() if not value]:
            raise ConfigError(
                "ask the judge",
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
                "Set judge.base_url (or $OPENAI_BASE_URL) to an OpenAI-compatible endpoint to which replies may be"
                " sent, and judge.model to one of its models.",
            )


def settings_for(rubric: Rubric, settings: JudgeSettings) -> JudgeSettings:
    """The judge for a rubric: that of the configuration, or another model at its endpoint."""
    named = rubric.judge.model
    return settings if named == ALIEN else settings.model_copy(update={"model": named})


def endpoints_of(settings: JudgeSettings) -> list[EndpointConfig]:
    """The judge, and its backup if there is one. What the settings do not say is empty."""
    url = endpoint_url(settings.base_url)
    endpoints = [EndpointConfig(settings.model or "", url, settings.api_key_env)]
    if backup := settings.backup:
        url, model = (backup.base_url or url).rstrip("/"), backup.model or settings.model or ""
        endpoints.append(EndpointConfig(model, url, backup.api_key_env, "judge.backup"))
    return endpoints


def require_judge(rubric: Rubric, settings: JudgeSettings) -> None:
    """Raises ConfigError if the rubric asks a judge and the settings do not say which one."""
    if rubric.asked:
        endpoints_of(settings_for(rubric, settings))[0].require()


class JudgeClient:
    """Asks the judge. Thread-safe.

    Attributes:
        capabilities: What its endpoints support.
        identity: Names its models and endpoints: a verdict of another model is another verdict.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        capabilities: EndpointCapabilities | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capabilities = capabilities or KNOWN
        self._format = None if settings.response_format == "auto" else ResponseFormat(settings.response_format)
        self._omit = settings.omit
        configs = endpoints_of(settings)
        self.endpoints = [JudgeEndpoint(config, settings) for config in configs]
        self.identity = "\0".join(f"{each.base_url}\0{each.model}" for each in configs)
        self._clock = clock
        self._failover_until = float("-inf")

    def ask(
        self,
        messages: list[ChatMessage],
        *,
        response_format: dict[str, Any],
        temperature: float,
        max_tokens: int,
        seed: int | None = None,
        stop: threading.Event = NEVER,
        attempts: int | None = None,
    ) -> JudgeReply:
        """One reply; a JudgeReply with a problem when the endpoint rejects this call only.

        `attempts` is how many are left for it, by default `judge.max_attempts`.

        Raises JudgeError: retryable when every attempt failed (`stop` ends the attempts), not retryable when every
        other call would be rejected too. Raises ConfigError as `EndpointConfig.require` does.
        """
        self.endpoints[0].config.require()
        optional = {TEMPERATURE: temperature, SEED: seed}
        request: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens}
        request |= {name: value for name, value in optional.items() if value is not None and name not in self._omit}
        failure: JudgeError | None = None
        for endpoint in self.endpoints[:: -1 if self._clock() < self._failover_until else 1]:
            try:
                return self._ask(endpoint, request, response_format, stop, attempts)
            except JudgeError as error:
                if len(self.endpoints) == 1 or stop.is_set():
                    raise
                if endpoint is self.endpoints[0]:
                    self._failover_until = self._clock() + FAILOVER_SECONDS
                    log.warning("%s", error)
                    failure = error
        assert failure is not None
        raise failure

    def _ask(
        self,
        endpoint: JudgeEndpoint,
        request: dict[str, Any],
        response_format: dict[str, Any],
        stop: threading.Event,
        attempts: int | None,
    ) -> JudgeReply:
        """In the strictest format that the endpoint supports, without the parameters that it does not."""
        name, is_again = str(endpoint.config), False
        while True:
            form = self._format or self.capabilities.format(name)
            sent = self.capabilities.supported_request(name, request, form, response_format)
            try:
                return replace(endpoint.call(sent, stop, attempts), format=form)
            except CallError as error:
                part, suspects = self._blamed(sent, error)
                if part is not None:
                    self._record(endpoint, part, error)
                elif suspects and not is_again:
                    is_again = True  # one odd answer: the same request may be answered
                elif not self._test(endpoint, sent, suspects, error, stop):
                    return endpoint.rejected(error)

    def _blamed(self, sent: Mapping[str, Any], error: CallError) -> tuple[str | None, list[str]]:
        """The part of a rejected request that its endpoint says not to support; or those of which one may be at
        fault, the likeliest first."""
        if error.code == "context_length_exceeded" or not (error.status in UNSUPPORTED or error.status >= 500):
            return None, []
        parts = [part for part in request_parts(sent) if self._format is None or part not in tuple(ResponseFormat)]
        named = [part for part in parts if is_rejection_of(str(error), part, error.status)]
        about = part_of_param(error)
        if about in parts and says_unsupported(error):
            return about, []
        if (moved := next((part for part in named if part in MOVED), None)) is not None:
            return moved, []
        optional = [part for part in reversed(parts) if part not in MOVED]
        if about:
            # Another value may do, unless it is one of ours.
            return None, [part for part in optional if part == about and part not in (SEED, TEMPERATURE)]
        is_possible = error.status in BAD_REQUEST and not THIS_CALL.search(str(error))
        suspects = [part for part in optional if is_possible or part in named]
        return None, sorted(suspects, key=lambda part: part not in named)

    def _test(
        self,
        endpoint: JudgeEndpoint,
        sent: Mapping[str, Any],
        suspects: list[str],
        error: CallError,
        stop: threading.Event,
    ) -> bool:
        """Whether the endpoint does not support one of these parts of a rejected request.

        Each is tested once a day by short requests: those with it must fail twice in the same way, and one without it
        be answered.
        """
        name, without = str(endpoint.config), None
        short = {"messages": SHORT_QUESTION, **{key: value for key, value in sent.items() if key.startswith("max_")}}
        with self.capabilities.testing:
            for part in suspects:
                if self.capabilities.supports(name, part) is None:
                    without = without or endpoint.try_once(short, stop)
                    if without != ANSWERED:
                        return False
                    asked = short | {key: sent[key] for key in FIELDS[part]}
                    first = endpoint.try_once(asked, stop)
                    second = first if first == ANSWERED else endpoint.try_once(asked, stop)
                    if first is None or second is None:
                        return False
                    if first == second != ANSWERED:
                        self._record(endpoint, part, error)
                    else:
                        self.capabilities.record(name, part, supported=True)
                if self.capabilities.lacks(name, part):
                    return True
        return False

    def _record(self, endpoint: JudgeEndpoint, part: str, error: CallError) -> None:
        name = str(endpoint.config)
        if not self.capabilities.record(name, part, supported=False):
            return
        if part in MOVED:
            log.info(
                "%s does not support %s (%s): for a day it is sent otherwise", name, LABELS.get(part, part), error
            )
            return
        is_format = part not in (SEED, TEMPERATURE)
        setting = f"response_format: {self.capabilities.format(name)}" if is_format else f"omit: [{part}]"
        log.warning(
            "%s does not support %s (%s): for a day it is asked without. Set judge.%s to do so from the start.",
            *(name, LABELS.get(part, part), error, setting),
        )

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


class JudgeEndpoint:
    """Calls to one model at one endpoint. Thread-safe. `has_answered` is set once it accepted a call."""

    def __init__(self, config: EndpointConfig, settings: JudgeSettings) -> None:
        self.config = config
        self.has_answered = False
        self.concurrency = ConcurrencyLimit(settings.max_thread)
        self._settings = settings
        self._requests = RateLimiter(settings.requests_per_minute)
        self._tokens = RateLimiter(settings.tokens_per_minute)
        self._mean_completion = COMPLETION_TOKENS
        self._warned_of_usage = False
        self._connecting = threading.Lock()
        self._connection: tuple[KeyPool, openai.OpenAI] | None = None

    def call(self, request: Mapping[str, Any], stop: threading.Event, most: int | None = None) -> JudgeReply:
        """The reply to one request, with at most so many attempts, by default as many as the settings allow.

        Raises CallError when the endpoint rejects this request, and JudgeError: retryable when every attempt failed
        (`stop` ends the attempts), not retryable when every other call would be rejected too.
        """

        def fails_on_part(error: CallError) -> bool:
            """Whether a server failed on a part of the request and names it: it would fail again."""
            parts = request_parts(request) if error.status >= 500 else ()
            return any(is_rejection_of(str(error), part, error.status) for part in parts)

        def is_retried(state: RetryCallState) -> bool:
            error = state.outcome and state.outcome.exception()
            # After another failure, the endpoint is not trusted to name the part that is at fault.
            return state.attempt_number > 1 or not (isinstance(error, CallError) and fails_on_part(error))

        settings = self._settings
        attempts = retrying(most or settings.max_attempts, settings.timeout_seconds, stop, is_retried=is_retried)
        try:
            reply = attempts(self._attempt, request, stop)
            self.has_answered = True
            return replace(reply, attempts=attempts.statistics["attempt_number"])
        except CallError as error:
            if error.status and (not error.retryable or fails_on_part(error)):
                raise
            raise self._unreachable(str(error)) from error

    def try_once(self, request: Mapping[str, Any], stop: threading.Event) -> Outcome | None:
        """Status and code of the answer to one attempt; None if they say nothing about what was sent."""
        try:
            self._attempt(request, stop)
        except CallError as error:
            return None if error.status in UNDECIDED else (error.status, error.code)
        return ANSWERED

    def models(self) -> list[str]:
        """The models that it lists, empty if it lists none; asking for them costs nothing.

        Raises JudgeError if it cannot be reached, fails, or accepts no key.
        """
        keys, client = self._connect()

        def listed(key: Key) -> Any:
            with call_errors():
                return client.get("/models", cast_to=object, options={"headers": authorization(key.secret)})

        try:
            answer = keys.attempt(listed, NEVER, self._settings.timeout_seconds, str(self.config))
            return [str(card["id"]) for card in answer["data"]]
        except CallError as error:
            if error.status in KEY_REJECTED:
                raise self._error(str(error), HINTS[error.status]) from error
            if not error.status or error.status >= 500:
                raise self._unreachable(str(error)) from error
            return []
        except (KeyError, TypeError):
            return []

    def rejected(self, error: CallError) -> JudgeReply:
        """A call that the endpoint rejected. Raises JudgeError when every other call would be rejected too."""
        message = str(error)
        hint = None if error.status == 403 and MODERATION.search(message) else HINTS.get(error.status)
        concerns_call = error.status == 413 or (THIS_CALL.search(message) and not OUTPUT_LIMIT.search(message))
        if error.status in (404, 405) and not urlsplit(self.config.base_url).path.strip("/"):
            hint = "Set {section}.base_url to {url}/v1, where most servers answer, or correct {section}.model."
        # An endpoint that accepted other calls is configured correctly: one long task must not stop the rest.
        if hint is None and (self.has_answered or concerns_call):
            problem = f"the endpoint refused this call: {message}"
            return JudgeReply("", problem, calls=0, is_final=True, judge=str(self.config))
        raise self._error(message, hint or REJECTED_HINT) from error

    def _attempt(self, request: Mapping[str, Any], stop: threading.Event) -> JudgeReply:
        keys, client = self._connect()
        send = partial(self._send, client, request, stop)
        return keys.attempt(send, stop, self._settings.timeout_seconds, str(self.config))

    def _send(self, client: openai.OpenAI, request: Mapping[str, Any], stop: threading.Event, key: Key) -> JudgeReply:
        """One request within the limits, which its outcome adjusts."""
        from openai.types.chat import ChatCompletion

        began = self.concurrency.acquire(stop)
        if began is None:
            raise CallError("judging stops", final=True)
        throttled: bool | None = None
        body = orjson.dumps({"model": self.config.model, **request})
        expected = len(body) / 4 + self._mean_completion
        try:
            wait = max(self._requests.reserve(), self._tokens.reserve(expected))
            beat(wait)
            if wait and stop.wait(wait):
                raise CallError("judging stops", final=True)
            sent, outcome = time.monotonic(), "failed"
            try:
                with call_errors():
                    reply = reply_of(post_chat(client, body, key.secret, ChatCompletion))
                outcome = "answered"
            except CallError as error:
                self._tokens.correct(-expected)
                throttled = error.status == 429 or error.retry_after is not None or None
                raise
            finally:
                CALL_SECONDS.labels(self.config.section, outcome).observe(time.monotonic() - sent)
            throttled = False
        finally:
            self.concurrency.release(began, throttled=throttled)
        if reply.prompt_tokens or reply.completion_tokens:
            self._mean_completion += 0.1 * (reply.completion_tokens - self._mean_completion)
            self._tokens.correct(reply.prompt_tokens + reply.completion_tokens - expected)
        elif not self._warned_of_usage:
            self._warned_of_usage = True
            log.warning("%s does not report token usage: its tokens are counted as 0", self.config.base_url)
        return replace(reply, judge=str(self.config))

    def _connect(self) -> tuple[KeyPool, openai.OpenAI]:
        """Made at the first call. Raises JudgeError for a URL, a key or a proxy that cannot be used."""
        with self._connecting:
            if self._connection is None:
                url, variable = self.config.base_url, self.config.api_key_env
                try:
                    client = model_client(url, seconds=self._settings.timeout_seconds, mend=mended)
                except ValueError as error:
                    hint = "Set {section}.base_url (or OPENAI_BASE_URL) to a URL such as http://127.0.0.1:8000/v1."
                    raise self._error(str(error), hint) from error
                keys = keys_in(os.environ.get(variable, ""))
                if not keys and url != OPENAI_URL:
                    keys = ["none"]  # most self-hosted servers need no key; one that does will say so
                if not keys:
                    raise self._error(
                        f"the environment variable {variable} with its key is not set",
                        "Set it, or name another one in {section}.api_key_env, or another endpoint in "
                        "{section}.base_url.",
                    )
                self._connection = KeyPool([Key(place, key) for place, key in enumerate(keys, start=1)]), client
            return self._connection

    def _unreachable(self, why: str) -> JudgeError:
        hint = "Check {section}.base_url and that the endpoint runs."
        return self._error(why, hint, retryable=True)

    def _error(self, why: str, hint: str, *, retryable: bool = False) -> JudgeError:
        hint = hint.format(
            key=self.config.api_key_env, section=self.config.section, url=self.config.base_url.rstrip("/")
        )
        who = "the judge" if self.config.section.startswith("judge") else "the model"
        return JudgeError(f"ask {who} {self.config}", why, hint, retryable=retryable)

    def close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
