"""The client of an embedding model: texts in, unit vectors out, by any OpenAI-compatible endpoint.

An endpoint can always fail on one text: it is too long, or the model computes no number for it. A batch that failed
is therefore retried in halves, as long as the endpoint answers for a plain text.
"""

from __future__ import annotations

import math
import os
import threading
from array import array
from collections.abc import Sequence
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

from flywheel.errors import FilterError
from flywheel.filtering.fingerprint import Deduplication
from flywheel.model_http_client import ModelHttpClient, RequestFailedError, ResponseTooLargeError, is_http_url

OPENAI_URL: Final = "https://api.openai.com/v1"
MAX_CHARACTERS: Final = 8000
"""Characters of a text that are sent: embedding models take a few thousand tokens."""
PLAIN_TEXT: Final = "a"
"""A text that every embedding model takes."""
MAX_VECTOR_BYTES: Final = 1 << 20
"""Upper bound of one vector as JSON."""
RETRYABLE: Final = frozenset({408, 409, 429})
TEXT_ERRORS: Final = frozenset({400, 413, 422})
HINTS: Final = {
    401: "Put the right key into OPENAI_API_KEY (or into deduplication's api_key).",
    402: "Fill up the account of the key in OPENAI_API_KEY (or in deduplication's api_key).",
    403: "Use a key with access to this model.",
    404: "Check deduplication's model and base_url.",
}
NEVER: Final = threading.Event()


class _CallError(Exception):
    """A call returned no vectors."""

    def __init__(
        self, why: str, *, status: int = 0, retry_after: float | None = None, malformed: bool = False
    ) -> None:
        """`status` is 0 without an HTTP response; `malformed` is set for a response without usable vectors."""
        super().__init__(why)
        self.status = status
        self.retry_after = retry_after
        # A call that alone exceeds the tokens per minute can only succeed with fewer texts.
        is_too_large = status == 429 and "too large" in why.lower()
        self.is_retryable = not (malformed or is_too_large) and (status == 0 or status in RETRYABLE or status >= 500)
        """Whether the same call may succeed later."""
        self.can_be_split = is_too_large or (
            status != 429 and (self.is_retryable or malformed or status in TEXT_ERRORS)
        )
        """Whether a call with fewer texts may succeed."""


class Embedder:
    """Calls an embedding model. Raises FilterError if it cannot be called; no text is then known to be at fault."""

    def __init__(self, settings: Deduplication, *, longest_wait: float = 20.0, stop: threading.Event = NEVER) -> None:
        """`stop` ends the waits between attempts. Raises FilterError for an endpoint that is no URL."""
        assert settings.model is not None
        self.model = settings.model
        self._settings = settings
        self._url = (settings.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
        key = settings.api_key or os.environ.get("OPENAI_API_KEY") or "none"
        if not is_http_url(self._url):
            raise self._failure(
                "its endpoint is no URL", "Set deduplication's base_url to one such as http://host/v1."
            )
        try:
            self._client = ModelHttpClient(
                self._url,
                timeout_seconds=settings.timeout_seconds,
                max_bytes=settings.batch_size * MAX_VECTOR_BYTES,
            )
        except ValueError as error:
            raise self._failure(str(error), "Correct HTTPS_PROXY and HTTP_PROXY, or unset them.") from error
        self._key = key.strip()
        self._backoff = wait_random_exponential(multiplier=0.5, max=longest_wait)
        attempts = stop_after_attempt(settings.max_attempts)
        self._retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, _CallError) and error.is_retryable),
            stop=lambda state: attempts(state) or stop_when_event_set(stop)(state) or self._waits_too_long(state),
            wait=self._wait,
            sleep=sleep_using_event(stop),
            reraise=True,
        )

    def embed(self, texts: Sequence[str]) -> list[bytes]:
        """One float32 vector per text; an empty one for a text that the endpoint cannot embed."""
        size = self._settings.batch_size
        batches = (texts[start : start + size] for start in range(0, len(texts), size))
        vectors = [vector for batch in batches for vector in self._batch(batch)]
        if len({len(vector) for vector in vectors if vector}) > 1:
            why = "it returned vectors of several lengths: there is more than one model behind it"
            raise self._failure(why, "Let one model answer by this name; the tasks wait.")
        return vectors

    def close(self) -> None:
        self._client.close()

    def _batch(self, texts: Sequence[str]) -> list[bytes]:
        try:
            return self._retrying(self._call, texts)
        except _CallError as error:
            if not error.can_be_split or self._attempt([PLAIN_TEXT]) is None:
                hint = HINTS[404] if error.status in TEXT_ERRORS else HINTS.get(error.status, "")
                raise self._failure(str(error), hint) from error
            is_retryable = error.is_retryable
        if len(texts) > 1:
            # One of them may be at fault, or they are too many for one call.
            middle = len(texts) // 2
            return self._batch(texts[:middle]) + self._batch(texts[middle:])
        # One more attempt, now that the endpoint has answered for the plain text.
        return (self._attempt(texts) if is_retryable else None) or [b""]

    def _attempt(self, texts: Sequence[str]) -> list[bytes] | None:
        try:
            return self._call(texts)
        except _CallError:
            return None

    def _call(self, texts: Sequence[str]) -> list[bytes]:
        sent = [text[:MAX_CHARACTERS].encode("utf-8", "replace").decode() or " " for text in texts]
        wanted = {"model": self.model, "input": sent, "encoding_format": "float"}
        try:
            answer = self._client.post("/embeddings", orjson.dumps(wanted), self._key)
        except (RequestFailedError, ResponseTooLargeError) as error:
            raise _CallError(str(error), malformed=isinstance(error, ResponseTooLargeError)) from error
        if not 200 <= answer.status < 300:
            why = f"it answered {answer.status} ({answer.error_message})"
            raise _CallError(why, status=answer.status, retry_after=answer.retry_after)
        try:
            return _vectors(orjson.loads(answer.body), len(texts))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            why = f"it returned no usable embeddings: {error}"
            raise _CallError(why, malformed=True) from error

    def _wait(self, state: RetryCallState) -> float:
        asked = _retry_after(state)
        return self._backoff(state) if asked is None else asked

    def _waits_too_long(self, state: RetryCallState) -> bool:
        asked = _retry_after(state)
        return asked is not None and asked > self._settings.timeout_seconds

    def _failure(self, why: str, hint: str) -> FilterError:
        return FilterError(
            f"embed questions with {self.model} at {self._url}",
            why,
            hint or "The tasks wait; they are judged when the endpoint is back.",
            retryable=not hint,
        )


def _vectors(reply: Any, count: int) -> list[bytes]:
    """The vectors of a response in the order of their texts. Raises various errors for a malformed response."""
    data = reply.get("data")
    if not isinstance(data, list):
        raise ValueError(str(reply.get("error") or reply)[:300])
    found = {item["index"]: item["embedding"] for item in data}
    if sorted(found) != list(range(count)):
        raise ValueError(f"{len(data)} vectors for {count} texts")
    return [_unit(found[place]) for place in range(count)]


def _unit(vector: Sequence[float]) -> bytes:
    length = math.sqrt(sum(value * value for value in vector))
    if not vector or not math.isfinite(length) or length == 0:
        raise ValueError("a vector without direction")
    return array("f", (value / length for value in vector)).tobytes()


def _retry_after(state: RetryCallState) -> float | None:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after if isinstance(error, _CallError) else None
