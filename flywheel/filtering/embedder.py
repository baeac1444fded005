"""The embedder: texts in, vectors of length 1 out, by any OpenAI-compatible endpoint."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Sequence
from typing import Final

import openai
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from flywheel.errors import FilterError
from flywheel.filtering.deduplication import Deduplication

LONGEST: Final = 8000
"""Characters of a text that are sent: embedding models take a few thousand tokens."""
RETRIED: Final = frozenset({408, 409, 429})
ABOUT_THE_TEXT: Final = frozenset({400, 413, 422})
HINTS: Final = {
    401: "Put the right key into OPENAI_API_KEY (or into deduplication's api_key).",
    403: "Use a key with access to this model.",
    404: "Check deduplication's model and base_url.",
}


def _worth_another_try(error: BaseException) -> bool:
    if isinstance(error, openai.APIStatusError):
        return error.status_code in RETRIED or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


class Embedder:
    """Asks the embedding model. Raises FilterError when it cannot be asked; then nothing is known of the texts."""

    def __init__(self, settings: Deduplication, *, longest_wait: float = 20.0) -> None:
        assert settings.model is not None
        self.model = settings.model
        self._settings = settings
        self._url = settings.base_url or os.environ.get("OPENAI_BASE_URL")
        key = settings.api_key or os.environ.get("OPENAI_API_KEY")
        # An endpoint without keys takes any; the client insists on one.
        self._client = openai.OpenAI(
            api_key=key or "none", base_url=self._url, timeout=settings.timeout_seconds, max_retries=0
        )
        self._retrying = Retrying(
            retry=retry_if_exception(_worth_another_try),
            stop=stop_after_attempt(settings.max_attempts),
            wait=wait_random_exponential(multiplier=0.5, max=longest_wait),
            reraise=True,
        )

    def embed(self, texts: Sequence[str]) -> list[bytes]:
        """One float32 vector for each text; an empty one for a text that the endpoint does not take."""
        size = self._settings.batch_size
        return [vector for start in range(0, len(texts), size) for vector in self._some(texts[start : start + size])]

    def close(self) -> None:
        self._client.close()

    def _some(self, texts: Sequence[str]) -> list[bytes]:
        try:
            return self._retrying(self._ask, texts)
        except openai.APIStatusError as error:
            if error.status_code not in ABOUT_THE_TEXT:
                raise self._failure(error, HINTS.get(error.status_code, "")) from error
            if len(texts) > 1:
                # One of them is at fault: the others are not made to wait for it.
                return [vector for text in texts for vector in self._some([text])]
            if "model" in str(error).lower() and not self._takes_anything():
                raise self._failure(error, HINTS[404]) from error
            return [b""]
        except openai.OpenAIError as error:
            raise self._failure(error, "") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise FilterError(
                f"embed {len(texts)} questions with {self.model}",
                f"the reply is none of an embedding model: {error}",
                "Check deduplication's base_url and model; the tasks wait.",
                retryable=True,
            ) from error

    def _takes_anything(self) -> bool:
        try:
            self._ask(["a"])
        except openai.APIStatusError:
            return False
        return True

    def _ask(self, texts: Sequence[str]) -> list[bytes]:
        sent = [text[:LONGEST].encode("utf-8", "replace").decode() or " " for text in texts]
        reply = self._client.embeddings.create(model=self.model, input=sent, encoding_format="float")
        found = {item.index: item.embedding for item in reply.data}
        if sorted(found) != list(range(len(texts))):
            raise ValueError(f"{len(found)} vectors came for {len(texts)} texts")
        return [_unit(found[place]) for place in range(len(texts))]

    def _failure(self, error: Exception, hint: str) -> FilterError:
        why = " ".join(str(error).split())[:300]
        return FilterError(
            f"embed questions with {self.model} at {self._url or 'OpenAI'}",
            why,
            hint or "The tasks wait; they are judged when the endpoint is back.",
            retryable=not hint,
        )


def _unit(vector: Sequence[float]) -> bytes:
    length = math.sqrt(sum(value * value for value in vector))
    if not vector or not math.isfinite(length) or length == 0:
        raise ValueError("a vector without direction came")
    return array("f", (value / length for value in vector)).tobytes()
