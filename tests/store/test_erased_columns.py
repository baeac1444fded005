"""Each column that can hold a text is emptied by an erasure, or is in the list of what an erasure does with it."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import JSON, Connection, LargeBinary, Text, select, update

from flywheel.store import judge_usage, ledger, notices
from flywheel.store.dead_letters import dead_letter
from flywheel.store.erasures import Kind
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import ERROR_OF, ROUND_NOTE, Store, note, noted
from flywheel.store.kernel.schema import dead_letters, embeddings, replies, tasks
from tests.factories.erased import erase_rows
from tests.factories.planted import WORDS
from tests.factories.task import task_keys
from tests.factories.trace import put_replies, reply
from tests.factories.verdict import put_judged

PLANTED = WORDS[0]
EMPTIED: Final = {
    replies, tasks, dead_letters, embeddings, schema.signature_bands, schema.recent_bands, schema.placed_calls,
    schema.call_hashes,
}  # fmt: skip
"""Tables whose rows are emptied in all columns, or go. So do rows of tables that refer to tasks or replies."""
OTHERS: Final = {
    "renamed": "conversations: key like; gate_conversations: conversation; watch_units: unit request_id;"
    " requests: arguments result error",
    "emptied": "conversations: words",
    "errors": "judge_errors: error; events: detail; meta: value; sources: error warning; rounds: reason",
    "records of erased tasks go": "rounds: result; adapters: probe",
    "made of figures": "deployments: reason error; watches: reason",
    # Times, states, hashes, names of rounds and models, random ids of traces. `subject` of an erasure is emptied when
    # all is erased.
    "no text of a task, and no id of a person": "meta: key;"
    " sources: path schema identity fingerprint anchor type condition swept_at read_at;"
    " erasures: kind pseudonym subject state report created_at finished_at; erased_conversations: pseudonym;"
    " erased_answers: hash;"
    " traces: trace_id rowids; conversations: split; events: at kind subject old new; judge_days: day purpose;"
    " judge_costs: day purpose currency; judge_errors: hour; judge_models: hash model endpoint first_used_at;"
    " rubrics: hash name first_used_at; requests: kind requested_by state created_at finished_at;"
    " available_samples: at target waits_for; round_samples: split;"
    " calibrations: rubric_id rubric_hash judge_hash judge_model created_at;"
    " rounds: name state target trigger parent config_hash rubric_hash dir selection created_at finished_at;"
    " gate_tests: decided_at decision; adapters: name parent base_model path sha256 state created_at;"
    " deployments: alias active_alias endpoints adapter previous ab_test state report created_at activated_at"
    " retired_at; watches: alias adapter other state figures ends_as created_at ended_at;"
    " watch_units: arm kind version outcome why",
}


def columns_of(text: str) -> list[str]:
    """The columns of a list such as `rounds: name state; tasks: key`."""
    named = [part.split(":") for part in text.split(";")]
    return [f"{table.strip()}.{name}" for table, names in named for name in names.split()]


def test_what_an_erasure_does_with_each_column_is_known() -> None:
    gone = {
        table
        for table in schema.metadata.sorted_tables
        if table in EMPTIED
        or (table is not schema.round_samples and {key.column.table for key in table.foreign_keys} & {tasks, replies})
    }
    others = [table for table in schema.metadata.sorted_tables if table not in gone]
    columns = [
        str(column) for table in others for column in table.c if isinstance(column.type, Text | JSON | LargeBinary)
    ]
    assert sorted(name for text in OTHERS.values() for name in columns_of(text)) == sorted(columns)


def rows_of(conn: Connection) -> list[Any]:
    return [row for table in (tasks, replies, dead_letters) for row in conn.execute(select(table)).all()]


async def test_an_erased_row_has_nothing_left_in_any_column(store: Store) -> None:
    """Also in one that has been added since, and in which nothing is stored by now."""
    kept = {"id", "kind", "source_id", "conversation_id", "task_id", "state", "split", "created_at"}

    def fill(conn: Connection) -> None:
        put_judged(conn, reply(1, conversation_id="a"))
        dead_letter(conn, "row", PLANTED, PLANTED, PLANTED, source=1)
        dead_letter(conn, "task", PLANTED, PLANTED, PLANTED)
        for table in (tasks, replies):
            texts = {c.name: PLANTED for c in table.c if isinstance(c.type, Text) and c.name not in kept}
            assert len(texts) >= 7
            conn.execute(update(table).values(texts))
        conn.execute(update(tasks).values(payload={"text": PLANTED}, beginning=7))

    await store.write(fill)
    assert str(await store.read(rows_of)).count(PLANTED) > 15
    assert await store.write(erase_rows, Kind.CONVERSATION, "a") == 1
    left = await store.read(rows_of)
    assert len(left) == 4, "each is counted"
    assert PLANTED not in str(left)
    [task, answered, *_] = left
    assert (task.payload, task.beginning, answered.content, answered.task_id) == ({}, None, None, None)


async def test_errors_that_could_quote_a_task_are_erased_and_counted_as_before(store: Store) -> None:
    def fail(conn: Connection) -> None:
        put_replies(conn, reply(1, conversation_id="a"))
        for error in (f"HTTP 400: {PLANTED}", f"HTTP 400: {PLANTED}", "no answer in time"):
            judge_usage.add_error(conn, error)
        notices.note_judge(conn, f"it cannot read {PLANTED}")
        note(conn, f"{ERROR_OF}rounds", f"it cannot render {PLANTED}")
        note(conn, ROUND_NOTE, "12 of 50 samples")
        ledger.note_source(conn, 1, condition="failing", error=PLANTED, warning=PLANTED)

    def said(conn: Connection) -> str:
        tables = (schema.judge_errors, schema.meta, schema.sources, schema.events)
        return str([row for table in tables for row in conn.execute(select(table)).all()])

    await store.write(fail)
    before = await store.read(judge_usage.errors_by_hour, 24)
    assert sum(before.values()) == 3
    assert await store.write(erase_rows, Kind.CONVERSATION, "another") == 0
    assert (await store.read(said)).count(PLANTED) == 7, "nothing was erased"
    assert await store.write(erase_rows, Kind.CONVERSATION, "a") == 1
    assert PLANTED not in await store.read(said)
    assert await store.read(judge_usage.errors_by_hour, 24) == before
    assert await store.read(noted, ROUND_NOTE) == "12 of 50 samples"


async def test_texts_of_other_tasks_stay(store: Store) -> None:
    await store.write(put_judged, reply(1, conversation_id="a"), reply(2, query=PLANTED), train_ratio=1.0)
    await store.write(lambda conn: dead_letter(conn, "task", task_keys(conn)[1], PLANTED, PLANTED))
    stays = {table: table.c.id == 2 for table in (tasks, replies, schema.verdicts)}

    def others(conn: Connection) -> list[Any]:
        rows = [row for table, is_other in stays.items() for row in conn.execute(select(table).where(is_other)).all()]
        return [*rows, *conn.execute(select(dead_letters)).all(), *conn.execute(select(schema.fingerprints)).all()]

    before = await store.read(others)
    assert str(before).count(PLANTED) >= 3
    assert await store.write(erase_rows, Kind.CONVERSATION, "a") == 1
    assert await store.read(others) == before
