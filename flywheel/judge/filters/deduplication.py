"""The filter `deduplication`: fingerprints and embeddings of questions, by which it compares them.

Two questions are compared only within one scope: the same target and split, the same conversation before them and
the same numbers. "Go on." is another question in another conversation, and "What is 90% of 140?" is not "… of 160?".
Questions that name different things are not near each other, however many words they share.

An embedding endpoint can always fail on one text: it is too long, or the model computes no number for it. A batch
that failed is therefore retried in halves, as long as the endpoint answers for a plain text.
"""

from __future__ import annotations

import math
import os
import re
import threading
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import orjson
import xxhash
from pydantic import Field, model_validator

from flywheel.config.section import Section
from flywheel.errors import FilterError
from flywheel.judge.limits import Key, KeyPool
from flywheel.records import similarity
from flywheel.records.similarity import Fingerprint
from flywheel.records.task import conversation_key
from flywheel.secrets import keys_in
from flywheel.system.http_client import (
    NEVER,
    CallError,
    authorization,
    call_errors,
    endpoint_url,
    model_client,
    retrying,
)

_QUOTED: Final = re.compile(
    r"\"[^\"\n]*\"|“[^“”]*”|„[^„“”]*[“”]|«[^«»]*»|「[^「」]*」|『[^『』]*』|《[^《》]*》|`[^`\n]*`"
    r"|(?<!\w)'[^'\n]*'(?!\w)|‘[^‘’]*’(?!\w)"
)
_ADDRESS: Final = re.compile(r"\b\w{1,20}://\S+|(?<!\S)[^\s@]{1,256}@[^\s@]+\.\w+")
_NUMBER: Final = re.compile(r"\d+(?:[.,:]\d+)*")
_NAME: Final = re.compile(r"(?<=[\w,;)] )(?!I['’])(?:[A-Z][\w'’]*\w)(?: [A-Z][\w'’]*\w)*")
"""Capitalised words inside a sentence."""
MAX_CHARACTERS: Final = 8000
"""Characters of a text that are sent: embedding models take a few thousand tokens."""
PLAIN_TEXT: Final = "a"
"""A text that every embedding model takes."""
MAX_VECTOR_BYTES: Final = 1 << 20
"""Upper bound of one vector as JSON."""
TEXT_ERRORS: Final = frozenset({400, 413, 422})
HINTS: Final = {
    401: "Put the right key into {key} (or into deduplication's api_key).",
    402: "Add credit to the account of the key in {key} (or in deduplication's api_key).",
    403: "Use a key with access to this model.",
    404: "Check deduplication's model and base_url.",
}


def template(query: str) -> str:
    """The question with placeholders for quotations, addresses, names and numbers."""
    for pattern, mask in ((_QUOTED, " q "), (_ADDRESS, " a "), (_NAME, "n"), (_NUMBER, "0")):
        query = pattern.sub(mask, query)
    return similarity.normalised(query)


def particulars(query: str) -> frozenset[int]:
    """Hashes of the words of names and quotations. Names are found by their capitals, if there are small letters."""
    passages = _QUOTED.findall(query)
    if any(char.islower() for char in query):
        passages += _NAME.findall(_QUOTED.sub(" q ", query))
    return similarity.words(" ".join(passages)) if passages else frozenset()


class Deduplication(Section):
    """Parameters of `deduplication`."""

    similarity_threshold: float = Field(default=0.8, gt=0, le=1)
    """A question repeats an earlier one from this similarity on: cosine of embeddings, or share of common words."""
    model: str | None = None
    """Embedding model. Without one, words are compared (MinHash), without any call."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint. Default: `$OPENAI_BASE_URL`."""
    api_key: str | None = None
    """Its key. Prefer the default: the environment variable that `api_key_env` names."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable with its key, or with several as `k1|k2`. While one is refused or
    rate-limited, the next is used."""
    backup_api_key_env: str | None = None
    """Name of an environment variable with further keys."""
    db_path: str | None = None
    """Accepted for compatibility and not used: earlier tasks are kept in Flywheel's own state."""
    batch_size: int = Field(default=64, gt=0)
    """Texts per call of the embedding model."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest wait for one response of the embedding model."""
    max_attempts: int = Field(default=4, gt=0)
    """Attempts per call; then the tasks wait for the endpoint."""

    @model_validator(mode="after")
    def _whole(self) -> Deduplication:
        if self.base_url and not self.model:
            raise ValueError("base_url needs a model")
        return self


def fingerprint(line: Mapping[str, Any], threshold: float, target: str = "") -> Fingerprint:
    """The fingerprint of the line of a target's task; the bands are for this similarity threshold."""
    query = str(line["main_query"])
    words = similarity.words(query)
    before = "\0".join(
        f"{message.get('role')}:{similarity.normalised(str(message.get('content')))}"
        for message in line["init_messages"]
        if message.get("role") not in ("system", "developer")
    )
    metadata = line["metadata"]
    user = str(metadata.get("user_id") or "")
    within = f"{metadata['split']}\0{before}\0" + "\0".join(similarity.numbers(query))
    scope = _hash(f"{within}\0\0{target}" if target else within)
    return Fingerprint(
        scope=scope,
        exact=_hash(similarity.normalised(query)) ^ scope,
        words=words,
        particulars=particulars(query),
        bands=tuple(band ^ scope for band in similarity.bands(words, threshold=threshold)),
        query=query,
        text=xxhash.xxh3_128_hexdigest(query.encode("utf-8", "replace")),
        conversation=conversation_key(metadata["conversation_id"], metadata["trace_id"]),
        user=user,
        template=_hash(template(query)),
        origin=f"user {user}" if user else f"source {metadata['source']}",
        at=datetime.fromisoformat(metadata["started_at"]).timestamp(),
    )


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) >> 1


class Embedder:
    """Calls an embedding model. Raises FilterError if it cannot be called; no text is then known to be at fault."""

    def __init__(self, settings: Deduplication, *, longest_wait: float = 20.0, stop: threading.Event = NEVER) -> None:
        """`stop` ends the waits between attempts. Raises FilterError for an endpoint that is no URL."""
        assert settings.model is not None
        self.model = settings.model
        self._settings, self._stop = settings, stop
        self._url = endpoint_url(settings.base_url)
        variables = filter(None, (settings.api_key_env, settings.backup_api_key_env))
        keys = [settings.api_key] if settings.api_key else [os.environ.get(name, "") for name in variables]
        self._keys = KeyPool(
            [Key(place, key) for place, key in enumerate(keys_in("|".join(keys)) or ["none"], start=1)]
        )
        try:
            self._client = model_client(
                self._url, seconds=settings.timeout_seconds, max_bytes=settings.batch_size * MAX_VECTOR_BYTES
            )
        except ValueError as error:
            hint = "Set deduplication's base_url to a URL such as http://host/v1."
            raise self._failure(str(error), hint) from error
        self._retrying = retrying(
            settings.max_attempts,
            settings.timeout_seconds,
            stop,
            longest_wait=longest_wait,
            is_retried=lambda state: not _is_too_large(state.outcome and state.outcome.exception()),
        )

    def embed(self, texts: Sequence[str]) -> list[bytes]:
        """One float32 vector per text; an empty one for a text that the endpoint cannot embed."""
        size = self._settings.batch_size
        batches = (texts[start : start + size] for start in range(0, len(texts), size))
        vectors = [vector for batch in batches for vector in self._batch(batch)]
        if len({len(vector) for vector in vectors if vector}) > 1:
            why = "it returned vectors of several lengths: more than one model answers by this name"
            raise self._failure(why, "Serve one model by this name. The tasks stay pending.")
        return vectors

    def close(self) -> None:
        self._client.close()

    def _batch(self, texts: Sequence[str]) -> list[bytes]:
        try:
            return self._retrying(self._call, texts)
        except CallError as error:
            # Whether a call with fewer texts may succeed.
            can_be_split = _is_too_large(error) or (
                error.status != 429 and (error.status == 0 or error.retryable or error.status in TEXT_ERRORS)
            )
            if not can_be_split or self._attempt([PLAIN_TEXT]) is None:
                hint = HINTS[404] if error.status in TEXT_ERRORS else HINTS.get(error.status, "")
                raise self._failure(str(error), hint) from error
            is_retryable = error.retryable and not _is_too_large(error)
        if len(texts) > 1:
            # One of them may be at fault, or they are too many for one call.
            middle = len(texts) // 2
            return self._batch(texts[:middle]) + self._batch(texts[middle:])
        # One more attempt, now that the endpoint has answered for the plain text.
        return (self._attempt(texts) if is_retryable else None) or [b""]

    def _attempt(self, texts: Sequence[str]) -> list[bytes] | None:
        try:
            return self._call(texts)
        except CallError:
            return None

    def _call(self, texts: Sequence[str]) -> list[bytes]:
        sent = [text[:MAX_CHARACTERS].encode("utf-8", "replace").decode() or " " for text in texts]
        seconds = self._settings.timeout_seconds
        answer = self._keys.attempt(partial(self._send, sent), self._stop, seconds, self._url)
        try:
            return _vectors(orjson.loads(answer), len(texts))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise CallError(f"it returned no usable embeddings: {error}", final=True) from error

    def _send(self, texts: list[str], key: Key) -> bytes:
        with call_errors():
            # Unparsed: the types of `openai` take 0.4 s for 64 vectors of 1,024 numbers, a parser of JSON 4 ms.
            answer = self._client.embeddings.with_raw_response.create(
                model=self.model, input=texts, encoding_format="float", extra_headers=authorization(key.secret)
            )
            return answer.content

    def _failure(self, why: str, hint: str) -> FilterError:
        return FilterError(
            f"embed questions with {self.model} at {self._url}",
            why,
            hint.format(key=self._settings.api_key_env)
            or "The tasks wait; they are judged when the endpoint is back.",
            retryable=not hint,
        )


def _is_too_large(error: object) -> bool:
    """A call that alone exceeds the tokens per minute can only succeed with fewer texts."""
    return isinstance(error, CallError) and error.status == 429 and "too large" in str(error).lower()


def _vectors(reply: Any, count: int) -> list[bytes]:
    """The vectors of a response in the order of their texts. Raises various errors for a malformed response."""
    data = reply.get("data")
    if not isinstance(data, list):
        raise ValueError(str(reply.get("error") or reply)[:300])
    by_index = {item["index"]: item["embedding"] for item in data}
    if sorted(by_index) != list(range(count)):
        raise ValueError(f"{len(data)} vectors for {count} texts")
    return [_unit(by_index[place]) for place in range(count)]


def _unit(vector: Sequence[float]) -> bytes:
    length = math.sqrt(sum(value * value for value in vector))
    if not vector or not math.isfinite(length) or length == 0:
        raise ValueError("a vector without direction")
    return array("f", (value / length for value in vector)).tobytes()
