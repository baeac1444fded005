"""What an erasure does with each column of the state that can hold a text. One that is in no list fails a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from sqlalchemy import Column, ColumnElement, Table, or_, true

from flywheel.records.erasure import ERASED
from flywheel.records.states import ReplyState
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import ERROR_OF, ROUND_NOTE
from flywheel.store.kernel.schema import (
    adapters,
    conversations,
    dead_letters,
    deployments,
    events,
    judge_errors,
    meta,
    replies,
    requests,
    rounds,
    sources,
    tasks,
    verdicts,
    watches,
)
from flywheel.store.notices import JUDGE

EMPTIED: Final[Mapping[Column[Any], Any]] = {
    **dict.fromkeys((replies.c.agent, replies.c.detail, replies.c.user, replies.c.started_at), ""),
    replies.c.skip_reason: None,
    **dict.fromkeys((tasks.c[name] for name in ("agent", "adapter", "started_at", "excluded", "model")), ""),
    **dict.fromkeys((tasks.c.target, tasks.c.structure), ""),
    tasks.c.payload: {},
    conversations.c.words: b"",
    dead_letters.c.error: ERASED,
    dead_letters.c.excerpt: "",
}
"""Columns of rows that stay, because something counts them, with what is in them afterwards."""

RENAMED: Final = frozenset({
    replies.c.span_id, replies.c.trace_id, replies.c.conversation_id, tasks.c.key, tasks.c.conversation_id,
    conversations.c.key, conversations.c.like, schema.gate_conversations.c.conversation, dead_letters.c.subject,
    requests.c.arguments, requests.c.result, requests.c.error, schema.watch_units.c.unit,
    schema.watch_units.c.request_id,
})  # fmt: skip
"""Columns with ids, in the place of which are pseudonyms. Requests that have one lose comment and error; rows of
`watch_units` without an outcome go."""

REMOVED: Final = frozenset(
    {
        schema.labels, verdicts, schema.influences, schema.fingerprints, schema.fingerprint_bands, schema.embeddings,
        schema.duplicates, schema.signature_bands, schema.recent_bands, schema.reply_calls, schema.placed_calls,
        schema.call_hashes,
    }
)  # fmt: skip
"""Tables whose rows go with the task, the text, the conversation, the reply or the call that they are about."""


class Sentence(NamedTuple):
    """A column with sentences for people, in the rows `where`. `instead` is in the place of one that quotes a text;
    None: its row goes."""

    column: Column[Any]
    instead: str | None = ERASED
    where: ColumnElement[bool] = true()


SENTENCES: Final = (
    Sentence(judge_errors.c.error, None),
    Sentence(dead_letters.c.error),
    Sentence(dead_letters.c.excerpt, ""),
    Sentence(replies.c.detail, where=replies.c.state == ReplyState.DEAD.value),
    Sentence(events.c.detail, where=events.c.kind.in_([JUDGE, sources.name, dead_letters.name])),
    # Other notes are no sentences.
    Sentence(meta.c.value, where=or_(meta.c.key == ROUND_NOTE, meta.c.key.startswith(ERROR_OF))),
    Sentence(sources.c.error),
    Sentence(sources.c.warning),
    Sentence(rounds.c.reason),
    Sentence(deployments.c.reason),
    Sentence(deployments.c.error),
    Sentence(watches.c.reason),
)
"""What may quote a text of any task. Events about other rows lose their details with these."""

RECORDS: Final = frozenset({rounds.c.result, adapters.c.comparison, adapters.c.probe})
"""JSON with records of tasks, of which those of erased ones are removed (`flywheel.daemon.rounds.erasure`)."""

_TEXTLESS: Final = {
    "meta": "key",
    "sources": "path schema identity fingerprint anchor type condition swept_at read_at",
    "replies": "state created_at",
    "erasures": "kind pseudonym subject state report created_at finished_at",
    "erased_conversations": "pseudonym",
    "erased_answers": "hash",
    "traces": "trace_id rowids",
    "conversations": "split",
    "tasks": "split state retry_at created_at",
    "dead_letters": "kind state created_at",
    "events": "at kind subject old new",
    "judge_days": "day purpose",
    "judge_costs": "day purpose currency",
    "judge_errors": "hour",
    "judge_models": "hash model endpoint first_used_at",
    "rubrics": "hash name first_used_at",
    "requests": "kind requested_by state created_at finished_at",
    "available_samples": "at target waits_for",
    "calibrations": "rubric_id rubric_hash judge_hash judge_model created_at",
    "rounds": "name state target trigger parent config_hash rubric_hash dir selection created_at finished_at",
    "round_samples": "split",
    "gate_decisions": "decided_at decision",
    "adapters": "name parent base_model path sha256 state created_at",
    "deployments": "alias active_alias endpoints adapter previous ab_test state report"
    " created_at activated_at retired_at",
    "watches": "alias adapter other state figures ends_as created_at ended_at",
    "watch_units": "arm kind version outcome why",
}
TEXTLESS: Final = frozenset(
    schema.metadata.tables[table].c[name] for table, names in _TEXTLESS.items() for name in names.split()
)
"""Columns without a text of a task and without an id of a person: times, states, hashes, names of rounds and models,
random ids of traces. `subject` of an erasure is emptied when all is erased."""


def emptied(table: Table) -> dict[str, Any]:
    """Values of the columns of an erased row that are emptied."""
    return {column.name: value for column, value in EMPTIED.items() if column.table is table}
