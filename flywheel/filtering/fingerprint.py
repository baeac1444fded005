"""Deduplication: what two questions are compared by. Nothing is stored or asked here.

Only questions of one scope are compared: on the same side of the split, after the same conversation, with the same
numbers. "Go on." is another question in another conversation, and "What is 90% of 140?" is not "… of 160?". Nor are
those near that name different things, however many of their words are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from flywheel import similarity
from flywheel.filtering.query_template import particulars


class Deduplication(BaseModel):
    """Parameters of `deduplication`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    similarity_threshold: float = Field(default=0.8, gt=0, le=1)
    """From which likeness on a question repeats an earlier one: cosine of embeddings, or share of common words."""
    model: str | None = None
    """Embedding model. Without one, words are compared (MinHash), and nothing is asked."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint. Default: `OPENAI_BASE_URL`, else OpenAI's own."""
    api_key: str | None = None
    """Its key. Better none here: the default is the environment variable `OPENAI_API_KEY`."""
    db_path: str | None = None
    """Accepted and not used: what is known of earlier tasks is kept in Flywheel's own state."""
    batch_size: int = Field(default=64, gt=0)
    """Texts in one call of the embedding model."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest wait for one answer of the embedding model."""
    max_attempts: int = Field(default=4, gt=0)
    """Tries per call before the tasks wait for the endpoint."""

    @model_validator(mode="after")
    def _whole(self) -> Deduplication:
        if self.base_url and not self.model:
            raise ValueError("base_url needs a model")
        return self


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a question is compared by: `exact` and `scope` are 63-bit hashes, `text` one that names its embedding."""

    scope: int
    exact: int
    words: frozenset[int]
    particulars: frozenset[int]
    bands: tuple[int, ...]
    query: str
    text: str


def fingerprint(line: Mapping[str, Any], threshold: float) -> Fingerprint:
    """The fingerprint of a task line; `threshold` decides the bands."""
    query = str(line["main_query"])
    words = similarity.words(query)
    before = "\0".join(
        f"{message.get('role')}:{similarity.normalised(str(message.get('content')))}"
        for message in line["init_messages"]
        if message.get("role") not in ("system", "developer")
    )
    scope = _hash(f"{line['metadata']['split']}\0{before}\0" + "\0".join(similarity.numbers(query)))
    return Fingerprint(
        scope=scope,
        exact=_hash(similarity.normalised(query)) ^ scope,
        words=words,
        particulars=particulars(query),
        bands=tuple(band ^ scope for band in similarity.bands(words, threshold=threshold)),
        query=query,
        text=xxhash.xxh3_128_hexdigest(query.encode("utf-8", "replace")),
    )


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) >> 1
