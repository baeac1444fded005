"""Removes personal data from a batch before any of it is stored or written to a file."""

from __future__ import annotations

import orjson
from msgspec.structs import replace

from flywheel.errors import FlywheelError
from flywheel.judge.filters.pii import Redactor
from flywheel.records.batch import Batch, Entry, line_bytes
from flywheel.records.similarity import beginning_of, prompt_signatures
from flywheel.records.trace import DeadRow


def redacted(batch: Batch, redact: Redactor) -> Batch:
    """The batch without personal data. Content hashes stay those of the original: they only detect changes.

    An entry that cannot be redacted becomes a dead row, without its texts. Raises ConfigError.
    """

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

    entries: list[Entry] = []
    dead: list[DeadRow] = []
    given: tuple[Entry | DeadRow, ...] = (*batch.entries, *batch.dead)
    for each in given:
        try:
            if isinstance(each, Entry):
                entries.append(entry(each))
            else:
                dead.append(replace(each, error=text(each.error), excerpt=text(each.excerpt)))
        except FlywheelError:
            raise
        except Exception as error:
            # The error's message may quote the text.
            why = f"the filter pii cannot redact it ({type(error).__name__}): nothing of its text is stored"
            rowid = 0 if isinstance(each, Entry) else each.rowid
            dead.append(DeadRow(rowid, each.span_id, each.trace_id, why))
    return replace(batch, entries=tuple(entries), dead=tuple(dead))
