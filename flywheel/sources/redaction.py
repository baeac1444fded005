"""Removes personal data from a batch before any of it is stored or written to a file."""

from __future__ import annotations

import orjson
from msgspec.structs import replace

from flywheel.batch import Batch, Entry, line_bytes
from flywheel.filtering.pii import Redactor
from flywheel.similarity import beginning_of, prompt_signatures


def redacted(batch: Batch, redact: Redactor) -> Batch:
    """The batch without personal data. Content hashes stay those of the original: they only detect changes."""

    def text(text: str) -> str:
        line = {"main_query": text, "answer": "", "init_messages": [], "metadata": {}}
        return str(redact(line)["main_query"]) if text else text

    def entry(entry: Entry) -> Entry:
        detail = text(entry.detail)
        if not entry.line:
            return replace(entry, detail=detail)
        line = redact(orjson.loads(entry.line))
        words, bands = prompt_signatures([line["main_query"]])[0] if entry.words else ((), ())
        beginning = beginning_of(line)
        return replace(entry, line=line_bytes(line), detail=detail, beginning=beginning, words=words, bands=bands)

    return replace(
        batch,
        entries=tuple(entry(one) for one in batch.entries),
        dead=tuple(replace(row, error=text(row.error), excerpt=text(row.excerpt)) for row in batch.dead),
    )
