"""One model at one endpoint: attempts and retries (by tenacity), its keys, its speed, and errors in our words.

Knows what HTTP says of a call. What a reply is worth, and how the judge is best asked, others know.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
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
from flywheel.judge.completion import Reply
from flywheel.judge.concurrency_limit import InFlight
from flywheel.judge.keys import Key, KeyPool
from flywheel.judge.rate_limiter import Pace
from flywheel.judge.response_errors import CallError, read_answer
from flywheel.judge.response_formats import in_request, names
from flywheel.transport import Answer, TooLargeError, Transport, TransportError, is_address

log = logging.getLogger(__name__)

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
class Who:
    """A model at an endpoint, and the section of the configuration that names it."""

    model: str
    base_url: str
    api_key_env: str
    section: str = "judge"

    def __str__(self) -> str:
        return f"{self.model} at {self.base_url}"


class Endpoint:
    """Thread-safe. `has_answered` is set once it took a call: it is set up well enough, then."""

    def __init__(self, who: Who, settings: JudgeSettings) -> None:
        self.who = who
        self.has_answered = False
        self.in_flight = InFlight(settings.max_thread)
        self._settings = settings
        self._requests = Pace(settings.requests_per_minute)
        self._tokens = Pace(settings.tokens_per_minute)
        self._mean_completion = COMPLETION_GUESS
        self._usage_missed = False
        self._making = threading.Lock()
        self._keys: KeyPool | None = None
        self._transport: Transport | None = None

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

    def listings(self) -> list[Answer]:
        """What it answers when it is asked for its models, which costs nothing: without a key, and by each key.

        Raises JudgeError where nobody answers.
        """
        keys, transport = self._connected()
        try:
            return [transport.get("/models", key) for key in ("", *(each.secret for each in keys))]
        except (TransportError, TooLargeError) as error:
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

    def _ask(self, transport: Transport, keys: KeyPool, key: Key, body: bytes, stop: threading.Event) -> Reply:
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
            except TooLargeError as error:
                reply = Reply("", str(error))
            except TransportError as error:
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

    def _connected(self) -> tuple[KeyPool, Transport]:
        if self._keys is None or self._transport is None:
            with self._making:
                self._check_url()
                self._keys = self._keys or KeyPool(self._secrets())
                try:
                    self._transport = self._transport or Transport(
                        self.who.base_url, timeout_seconds=self._settings.timeout_seconds
                    )
                except ValueError as error:
                    raise self._error(str(error), "Correct HTTPS_PROXY and HTTP_PROXY, or unset them.") from error
        return self._keys, self._transport

    def _check_url(self) -> None:
        if not is_address(self.who.base_url):
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
