"""The embedder: texts in, vectors of length 1 out, by any OpenAI-compatible endpoint.

An endpoint can fail on one text for ever: one that is too long for it, or one for which its model computes no number.
So what a batch failed with is asked again in halves, as long as the endpoint takes a plain text meanwhile.
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
LONGEST: Final = 8000
"""Characters of a text that are sent: embedding models take a few thousand tokens."""
PLAIN: Final = "a"
"""A text that every embedding model takes."""
MOST_BYTES: Final = 1 << 20
"""More than one vector has as JSON."""
RETRIED: Final = frozenset({408, 409, 429})
ABOUT_THE_TEXTS: Final = frozenset({400, 413, 422})
HINTS: Final = {
    401: "Put the right key into OPENAI_API_KEY (or into deduplication's api_key).",
    402: "Fill up the account of the key in OPENAI_API_KEY (or in deduplication's api_key).",
    403: "Use a key with access to this model.",
    404: "Check deduplication's model and base_url.",
}
NEVER: Final = threading.Event()


class _AnswerError(Exception):
    """No vectors came. `status` is that of the answer, 0 where none came; `is_odd` is set for one that is none."""

    def __init__(self, said: str, *, status: int = 0, retry_after: float | None = None, is_odd: bool = False) -> None:
        super().__init__(said)
        self.status = status
        self.retry_after = retry_after
        self._is_odd = is_odd

    @property
    def is_about_size(self) -> bool:
        """A limit of tokens in a minute that this call alone is beyond can be met by smaller ones only."""
        return self.status == 429 and "too large" in str(self).lower()

    @property
    def can_pass(self) -> bool:
        """Whether the same call may succeed in a moment."""
        if self._is_odd or self.is_about_size:
            return False
        return self.status == 0 or self.status in RETRIED or self.status >= 500

    @property
    def may_be_about_the_texts(self) -> bool:
        """Whether fewer of the texts may fare better."""
        if self.status == 429:
            return self.is_about_size
        return self.can_pass or self._is_odd or self.status in ABOUT_THE_TEXTS


class Embedder:
    """Asks the embedding model. Raises FilterError when it cannot be asked; then nothing is known of the texts."""

    def __init__(self, settings: Deduplication, *, longest_wait: float = 20.0, stop: threading.Event = NEVER) -> None:
        """`stop` ends the waits between attempts. Raises FilterError for an endpoint that is no address."""
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
            self._transport = ModelHttpClient(
                self._url,
                timeout_seconds=settings.timeout_seconds,
                max_bytes=settings.batch_size * MOST_BYTES,
            )
        except ValueError as error:
            raise self._failure(str(error), "Correct HTTPS_PROXY and HTTP_PROXY, or unset them.") from error
        self._key = key.strip()
        self._backoff = wait_random_exponential(multiplier=0.5, max=longest_wait)
        attempts = stop_after_attempt(settings.max_attempts)
        self._retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, _AnswerError) and error.can_pass),
            stop=lambda state: attempts(state) or stop_when_event_set(stop)(state) or self._must_wait_too_long(state),
            wait=self._wait,
            sleep=sleep_using_event(stop),
            reraise=True,
        )

    def embed(self, texts: Sequence[str]) -> list[bytes]:
        """One float32 vector for each text; an empty one for a text of which the endpoint makes none."""
        size = self._settings.batch_size
        found = [vector for start in range(0, len(texts), size) for vector in self._some(texts[start : start + size])]
        if len({len(vector) for vector in found if vector}) > 1:
            why = "vectors of several lengths came: there is more than one model behind it"
            raise self._failure(why, "Let one model answer by this name; the tasks wait.")
        return found

    def close(self) -> None:
        self._transport.close()

    def _some(self, texts: Sequence[str]) -> list[bytes]:
        try:
            return self._retrying(self._ask, texts)
        except _AnswerError as error:
            if not error.may_be_about_the_texts or self._tried([PLAIN]) is None:
                hint = HINTS[404] if error.status in ABOUT_THE_TEXTS else HINTS.get(error.status, "")
                raise self._failure(str(error), hint) from error
            can_pass = error.can_pass
        if len(texts) > 1:
            # One of them may be at fault, or there are too many at once.
            middle = len(texts) // 2
            return self._some(texts[:middle]) + self._some(texts[middle:])
        # What failed beside a plain text that did not is asked once more, if it is of a kind that passes.
        return (self._tried(texts) if can_pass else None) or [b""]

    def _tried(self, texts: Sequence[str]) -> list[bytes] | None:
        try:
            return self._ask(texts)
        except _AnswerError:
            return None

    def _ask(self, texts: Sequence[str]) -> list[bytes]:
        sent = [text[:LONGEST].encode("utf-8", "replace").decode() or " " for text in texts]
        wanted = {"model": self.model, "input": sent, "encoding_format": "float"}
        try:
            answer = self._transport.post("/embeddings", orjson.dumps(wanted), self._key)
        except (RequestFailedError, ResponseTooLargeError) as error:
            raise _AnswerError(str(error), is_odd=isinstance(error, ResponseTooLargeError)) from error
        if not answer.is_success:
            said = f"it answered {answer.status} ({answer.error_message})"
            raise _AnswerError(said, status=answer.status, retry_after=answer.retry_after)
        try:
            return _vectors(orjson.loads(answer.body), len(texts))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            said = f"the reply is none of an embedding model: {error}"
            raise _AnswerError(said, is_odd=True) from error

    def _wait(self, state: RetryCallState) -> float:
        asked = _retry_after(state)
        return self._backoff(state) if asked is None else asked

    def _must_wait_too_long(self, state: RetryCallState) -> bool:
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
    """The vectors of a reply in the order of their texts. Raises what a reply of another form leads to."""
    data = reply.get("data")
    if not isinstance(data, list):
        raise ValueError(str(reply.get("error") or reply)[:300])
    found = {item["index"]: item["embedding"] for item in data}
    if sorted(found) != list(range(count)):
        raise ValueError(f"{len(data)} vectors came for {count} texts")
    return [_unit(found[place]) for place in range(count)]


def _unit(vector: Sequence[float]) -> bytes:
    length = math.sqrt(sum(value * value for value in vector))
    if not vector or not math.isfinite(length) or length == 0:
        raise ValueError("a vector without direction came")
    return array("f", (value / length for value in vector)).tobytes()


def _retry_after(state: RetryCallState) -> float | None:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after if isinstance(error, _AnswerError) else None
