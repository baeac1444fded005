"""Fingerprints of questions, by which `deduplication` compares them, and the parameters of that filter.

Two questions are compared only within one scope: the same target and split, the same conversation before them and
the same numbers. "Go on." is another question in another conversation, and "What is 90% of 140?" is not "… of 160?".
Questions that name different things are not near each other, however many words they share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import xxhash
from pydantic import Field, model_validator

from flywheel.config.section import Section
from flywheel.records import similarity
from flywheel.records.similarity import Fingerprint

_QUOTED: Final = re.compile(
    r"\"[^\"\n]*\"|“[^“”]*”|„[^„“”]*[“”]|«[^«»]*»|「[^「」]*」|『[^『』]*』|《[^《》]*》|`[^`\n]*`"
    r"|(?<!\w)'[^'\n]*'(?!\w)|‘[^‘’]*’(?!\w)"
)
_ADDRESS: Final = re.compile(r"\b\w{1,20}://\S+|(?<!\S)[^\s@]{1,256}@[^\s@]+\.\w+")
_NUMBER: Final = re.compile(r"\d+(?:[.,:]\d+)*")
_NAME: Final = re.compile(r"(?<=[\w,;)] )(?!I['’])(?:[A-Z][\w'’]*\w)(?: [A-Z][\w'’]*\w)*")
"""Capitalised words inside a sentence."""


def template(query: str) -> str:
    """The question with placeholders for quotations, addresses, names and numbers."""
    for pattern, mask in ((_QUOTED, " q "), (_ADDRESS, " a "), (_NAME, "n"), (_NUMBER, "0")):
        query = pattern.sub(mask, query)
    return similarity.normalised(query)


def particulars(query: str) -> frozenset[int]:
    """Hashes of the words of names and quotations. Names are found by their capitals, if there are small letters."""
    found = _QUOTED.findall(query)
    if any(char.islower() for char in query):
        found += _NAME.findall(_QUOTED.sub(" q ", query))
    return similarity.words(" ".join(found)) if found else frozenset()


class Deduplication(Section):
    """Parameters of `deduplication`."""

    similarity_threshold: float = Field(default=0.8, gt=0, le=1)
    """A question repeats an earlier one from this similarity on: cosine of embeddings, or share of common words."""
    model: str | None = None
    """Embedding model. Without one, words are compared (MinHash), without any call."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint. Default: `OPENAI_BASE_URL`, else OpenAI's own."""
    api_key: str | None = None
    """Its key. Prefer the default: the environment variable `OPENAI_API_KEY`."""
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
    within = f"{line['metadata']['split']}\0{before}\0" + "\0".join(similarity.numbers(query))
    scope = _hash(f"{within}\0\0{target}" if target else within)
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
