"""One call to the judge: the openai client, with retries by tenacity and errors in our words."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import Any

import openai
from openai.types.chat import ChatCompletion
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from flywheel.config import JudgeSettings
from flywheel.errors import JudgeError
from flywheel.trace import ChatMessage

log = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
RETRIED = frozenset({408, 409, 429})
FATAL = {
    401: "Put the right key into the environment variable {key} (judge.api_key_env names it).",
    403: "Use a key with access to this model (judge.api_key_env names the variable {key}), or another judge.model.",
    404: "Check judge.model and judge.base_url.",
}
"""Answers that every other call would get too, with the setting to change."""

# Full jitter up to a doubling bound: many threads that failed together do not come back together.
_backoff = wait_random_exponential(multiplier=0.5, max=20)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. `problem` says why there is no text to read, if there is none."""

    text: str
    problem: str
    prompt_tokens: int
    completion_tokens: int


class JudgeClient:
    """Asks one model at one endpoint. Thread-safe; it remembers whether the endpoint takes a JSON schema."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self.base_url = (settings.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
        self._takes_schema = True
        self._client: openai.OpenAI | None = None
        self._making = threading.Lock()

    def ask(
        self, messages: list[ChatMessage], *, response_format: dict[str, Any], temperature: float, max_tokens: int
    ) -> Reply:
        """One answer; a refusal of just this call (400, 413, 422) is a Reply with a problem.

        Raises JudgeError: retryable when the endpoint failed at every attempt, not retryable when it refuses us.
        """
        wanted: dict[str, Any] = {
            "model": self._settings.model,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        if self._takes_schema:
            try:
                return self._retried({**wanted, "response_format": response_format})
            except openai.APIStatusError as error:
                if error.status_code not in (400, 422):
                    return self._refused(error)
            # It may be the schema that it does not take; if it takes the call without, it is not sent again.
            try:
                reply = self._retried(wanted)
            except openai.APIStatusError as error:
                return self._refused(error)
            log.info("%s takes no JSON schema: the reply's form is asked for in words", self.base_url)
            self._takes_schema = False
            return reply
        try:
            return self._retried(wanted)
        except openai.APIStatusError as error:
            return self._refused(error)

    def _retried(self, wanted: dict[str, Any]) -> Reply:
        retrying = Retrying(
            stop=stop_after_attempt(self._settings.max_attempts),
            wait=self._wait,
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
        completion: Any = self._connected().chat.completions.create(**wanted)
        if not isinstance(completion, ChatCompletion):
            raise ValueError("the answer is not JSON")  # a proxy's page, say
        usage = completion.usage
        tokens = (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0)
        if not completion.choices:
            said = getattr(completion, "error", None)
            return Reply("", f"the endpoint answered without a choice{f': {said}' if said else ''}", *tokens)
        message = completion.choices[0].message
        if message is None or message.refusal:
            return Reply("", f"the judge refused: {message.refusal}" if message else "the choice is empty", *tokens)
        return Reply(message.content or "", "" if message.content else "the reply is empty", *tokens)

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, openai.APIStatusError):
            asked = error.response.headers.get("retry-after", "")
            if asked.replace(".", "", 1).isdigit():
                return min(float(asked), self._settings.timeout_seconds)
        return _backoff(state)

    def _connected(self) -> openai.OpenAI:
        with self._making:
            if self._client is None:
                self._client = openai.OpenAI(
                    base_url=self.base_url,
                    api_key=self._key(),
                    max_retries=0,  # tenacity does it, and counts
                    timeout=self._settings.timeout_seconds,
                )
            return self._client

    def _key(self) -> str:
        key = os.environ.get(self._settings.api_key_env, "").strip()
        if key:
            return key
        if self.base_url != OPENAI_URL:
            return "none"  # most servers of one's own want none; one that does will say so
        raise JudgeError(
            f"ask the judge {self._settings.model}",
            f"the environment variable {self._settings.api_key_env} with its key is not set",
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
        hint = FATAL.get(error.status_code)
        if hint is None:
            return Reply("", f"the endpoint refused this call: {_said(error)}", 0, 0)
        raise JudgeError(
            f"ask the judge {self._settings.model} at {self.base_url}",
            _said(error),
            hint.format(key=self._settings.api_key_env),
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


def _said(error: openai.APIStatusError) -> str:
    return f"it answered {error.status_code} ({' '.join(str(error.message).split())[:300]})"


def _cause(error: BaseException) -> str:
    """The innermost error's words: "Connection error." alone says nothing."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
