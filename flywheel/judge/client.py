"""One call to the judge: the openai client, with retries by tenacity and errors in our words."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import openai
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
from flywheel.judge.completion import Reply, reply_of
from flywheel.trace import ChatMessage

log = logging.getLogger(__name__)

OPENAI_URL: Final = "https://api.openai.com/v1"
RETRIED: Final = frozenset({408, 409, 429})
FATAL: Final = {
    401: "Put the right key into the environment variable {key} (judge.api_key_env names it).",
    402: "Fill up the account of the key in the environment variable {key}, or set another judge.base_url.",
    403: "Use a key with access to this model (judge.api_key_env names the variable {key}), or another judge.model.",
    404: "Check judge.model and judge.base_url.",
}
"""Answers that every other call would get too, with the setting to change."""
REFUSED: Final = (
    "Check judge.model, judge.temperature and judge.max_tokens, and that judge.base_url is the API's root."
)
THIS_CALL: Final = re.compile(
    r"context|too (long|large|many)|maximum|length|exceed|token|content.?(filter|manag)", re.I
)
"""What endpoints say when it is this exchange that they do not take: its length, or what stands in it."""
NEVER: Final = threading.Event()
"""The stop that does not come."""

# Full jitter up to a doubling bound: many threads that failed together do not come back together.
_backoff = wait_random_exponential(multiplier=0.5, max=20)


class JudgeClient:
    """Asks one model at one endpoint. Thread-safe; it remembers whether the endpoint takes a JSON schema."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self.base_url = (settings.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
        self._takes_schema = True
        self._has_answered = False
        self._usage_missed = False
        self._client: openai.OpenAI | None = None
        self._making = threading.Lock()

    def ask(
        self,
        messages: list[ChatMessage],
        *,
        response_format: dict[str, Any],
        temperature: float,
        max_tokens: int,
        stop: threading.Event = NEVER,
    ) -> Reply:
        """One answer; when the endpoint does not take just this call, a Reply with a problem.

        Raises JudgeError: retryable when the endpoint failed at every attempt (`stop` ends the attempts), not
        retryable when it refuses us.
        """
        wanted: dict[str, Any] = {
            "model": self._settings.model,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        if self._takes_schema:
            try:
                return self._retried({**wanted, "response_format": response_format}, stop)
            except openai.APIStatusError as error:
                if error.status_code not in (400, 422):
                    return self._refused(error)
            # It may be the schema that it does not take; if it takes the call without, it is not sent again.
        try:
            reply = self._retried(wanted, stop)
        except openai.APIStatusError as error:
            return self._refused(error)
        if self._takes_schema:
            log.info("%s takes no JSON schema: the reply's form is asked for in words", self.base_url)
            self._takes_schema = False
        return reply

    def _retried(self, wanted: dict[str, Any], stop: threading.Event) -> Reply:
        attempts = stop_after_attempt(self._settings.max_attempts)
        retrying = Retrying(
            stop=lambda state: attempts(state) or stop_when_event_set(stop)(state) or self._must_wait_too_long(state),
            wait=self._wait,
            sleep=sleep_using_event(stop),
            retry=retry_if_exception(_can_pass),
            reraise=True,
        )
        try:
            return retrying(self._once, wanted)
        except (openai.APIConnectionError, ValueError) as error:
            raise self._unreachable(_cause(error)) from error
        except openai.APIStatusError as error:
            if _can_pass(error):
                raise self._unreachable(_said(error)) from error
            raise

    def _once(self, wanted: dict[str, Any]) -> Reply:
        # The raw answer: the client would build its own objects of whatever came, and trust them.
        answer = self._connected().chat.completions.with_raw_response.create(**wanted)
        reply = reply_of(answer.content)
        self._has_answered = True
        if not reply.tells_usage and not self._usage_missed:
            self._usage_missed = True
            log.warning("%s does not tell what its calls cost: tokens are counted as 0", self.base_url)
        return reply

    def _wait(self, state: RetryCallState) -> float:
        asked = _retry_after(state)
        return _backoff(state) if asked is None else asked

    def _must_wait_too_long(self, state: RetryCallState) -> bool:
        asked = _retry_after(state)
        return asked is not None and asked > self._settings.timeout_seconds

    def _connected(self) -> openai.OpenAI:
        with self._making:
            if self._client is None:
                self._client = openai.OpenAI(
                    base_url=self._checked_url(),
                    api_key=self._key(),
                    max_retries=0,  # tenacity does it, and counts
                    timeout=self._settings.timeout_seconds,
                )
            return self._client

    def _checked_url(self) -> str:
        try:
            parts = urlsplit(self.base_url)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            whole = False
        if whole:
            return self.base_url
        raise JudgeError(
            f"ask the judge {self._settings.model}",
            f"its endpoint {self.base_url} is no URL",
            "Set judge.base_url (or OPENAI_BASE_URL) to something like http://127.0.0.1:8000/v1.",
        )

    def _key(self) -> str:
        name = self._settings.api_key_env
        key = os.environ.get(name, "").strip()
        if key and key.isascii() and key.isprintable():
            return key
        if not key and self.base_url != OPENAI_URL:
            return "none"  # most servers of one's own want none; one that does will say so
        raise JudgeError(
            f"ask the judge {self._settings.model}",
            f"the environment variable {name} with its key "
            f"{'holds characters that no key has' if key else 'is not set'}",
            "Set it, or name another one in judge.api_key_env, or another endpoint in judge.base_url.",
        )

    def _unreachable(self, why: str) -> JudgeError:
        return JudgeError(
            f"ask the judge {self._settings.model} at {self.base_url}",
            why,
            "Check judge.base_url and that the endpoint runs; nothing is lost, the tasks are asked again later.",
            retryable=True,
        )

    def _refused(self, error: openai.APIStatusError) -> Reply:
        """A call that the endpoint did not take: this one's fault, or raised as everybody's."""
        hint = FATAL.get(error.status_code)
        said = _said(error)
        # An endpoint that has answered others is set up well enough; one long task must not stop the rest.
        if hint is None and (self._has_answered or error.status_code == 413 or THIS_CALL.search(said)):
            return Reply("", f"the endpoint refused this call: {said}", calls=0)
        raise JudgeError(
            f"ask the judge {self._settings.model} at {self.base_url}",
            said,
            (hint or REFUSED).format(key=self._settings.api_key_env),
        ) from error

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _can_pass(error: BaseException) -> bool:
    """Whether the same call may succeed in a moment."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in RETRIED or error.status_code >= 500
    # A ValueError is an answer that was cut off or is no JSON.
    return isinstance(error, (openai.APIConnectionError, ValueError))


def _retry_after(state: RetryCallState) -> float | None:
    """Seconds that the endpoint asked us to wait, if it did: as a number, or as the time to come back at."""
    error = state.outcome.exception() if state.outcome else None
    if not isinstance(error, openai.APIStatusError):
        return None
    asked = error.response.headers.get("retry-after", "").strip()
    try:
        return max(
            0.0, float(asked) if asked[:1].isdigit() else parsedate_to_datetime(asked).timestamp() - time.time()
        )
    except ValueError:
        return None


def _said(error: openai.APIStatusError) -> str:
    return f"it answered {error.status_code} ({' '.join(str(error.message).split())[:300]})"


def _cause(error: BaseException) -> str:
    """The innermost error's words: "Connection error." alone says nothing."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
