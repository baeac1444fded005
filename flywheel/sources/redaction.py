"""Personal data leaves what a source brings before any of it is stored or written to a file."""

from __future__ import annotations

import orjson
from msgspec.structs import replace

from flywheel.batch import Batch, Entry, line_bytes
from flywheel.filtering.pii import Redactor
from flywheel.similarity import beginning_of, prompt_signatures
from flywheel.trace import DeadRow


def redacted(batch: Batch, redact: Redactor) -> Batch:
    """The batch as the ledger may have it. The hash of a reply's content stays: it only notices changes."""
    return replace(
        batch,
        entries=tuple(_entry(entry, redact) for entry in batch.entries),
        dead=tuple(_dead(row, redact) for row in batch.dead),
    )


def _entry(entry: Entry, redact: Redactor) -> Entry:
    detail = _text(entry.detail, redact)
    if not entry.line:
        return replace(entry, detail=detail)
    line = redact(orjson.loads(entry.line))
    words, bands = prompt_signatures([line["main_query"]])[0] if entry.words else ((), ())
    begun = beginning_of(line)
    return replace(entry, line=line_bytes(line), detail=detail, beginning=begun, words=words, bands=bands)


def _dead(row: DeadRow, redact: Redactor) -> DeadRow:
    return replace(row, error=_text(row.error, redact), excerpt=_text(row.excerpt, redact))


def _text(text: str, redact: Redactor) -> str:
    line = {"main_query": text, "answer": "", "init_messages": [], "metadata": {}}
    return str(redact(line)["main_query"]) if text else text
