"""Migrations of an older state database to the present schema, one per version."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from sqlalchemy import Connection, inspect, select, text, update
from sqlalchemy.schema import CreateColumn

from flywheel.records import exclusion
from flywheel.records.exclusion import Exclusion
from flywheel.records.similarity import beginning_of
from flywheel.records.states import TaskState
from flywheel.records.task import conversation_key
from flywheel.store.kernel.bulk import chunks
from flywheel.store.kernel.schema import metadata, sources, tasks
from flywheel.store.kernel.transitions import leave_gate

_PAGE: Final = 500
"""Tasks that are read at a time."""


def _add_columns(conn: Connection, **columns: tuple[str, ...]) -> None:
    """Create new tables, and add these columns and their indexes to existing tables."""
    look = inspect(conn)
    for name, added in columns.items():
        table = metadata.tables[name]
        # A table that an earlier step created has the present columns.
        there = {column["name"] for column in look.get_columns(name)}
        for column in added:
            if column in there:
                continue
            definition = CreateColumn(table.c[column]).compile(dialect=conn.dialect)
            conn.execute(text(f"ALTER TABLE {name} ADD COLUMN {definition}"))
    metadata.create_all(conn)
    look = inspect(conn)
    for table in metadata.sorted_tables:
        # A table that still lacks columns gets its indexes in the step that adds the last of them.
        if set(table.columns.keys()) <= {column["name"] for column in look.get_columns(table.name)}:
            for index in table.indexes:
                index.create(conn, checkfirst=True)


def _to_2(conn: Connection) -> None:
    _add_columns(
        conn,
        sources=("anchor", "type", "condition", "swept_at"),
        replies=("content",),
        dead_letters=("state", "attempts"),
        verdicts=("judgements",),
    )
    # The cursor used to stay before open traces, and traces had no checkpoints: reading starts over once, and the
    # ledger's keys prevent duplicates.
    conn.execute(update(sources).values(rowid_done=0))


def _to_3(conn: Connection) -> None:
    # Each task had a mark when it was in the task file. Tasks were written in the order of their numbers.
    conn.execute(
        text(
            "INSERT INTO meta (key, value) SELECT 'exported_to', max(id) FROM tasks WHERE exported "
            "AND id < coalesce((SELECT min(id) FROM tasks WHERE NOT exported), 1 << 62) HAVING max(id) IS NOT NULL"
        )
    )
    conn.execute(text("DROP INDEX IF EXISTS tasks_to_export"))
    conn.execute(text("ALTER TABLE tasks DROP COLUMN exported"))


def _to_4(conn: Connection) -> None:
    # The new index has only conversations that follow another one.
    conn.execute(text("DROP INDEX IF EXISTS ix_conversations_like"))
    _add_columns(conn)


def _to_5(conn: Connection) -> None:
    _add_columns(conn)


def _to_6(conn: Connection) -> None:
    """Nothing: what this version added has another form in the next one."""


def _to_7(conn: Connection) -> None:
    if "images" in {column["name"] for column in inspect(conn).get_columns("tasks")}:
        conn.execute(text("DROP INDEX IF EXISTS tasks_with_images"))
        conn.execute(text("ALTER TABLE tasks DROP COLUMN images"))
    conn.execute(text("DROP INDEX IF EXISTS conversations_joined"))
    conn.execute(text("ALTER TABLE judge_days RENAME TO judge_days_of_6"))
    task_columns = ("excluded", "model", "beginning", "crashes")
    _add_columns(conn, tasks=task_columns, conversations=("exact",), rounds=("usage_read",))
    _rename_band_tables(conn)
    _add_line_keys(conn)
    _store_beginnings(conn)
    _add_purposes(conn)
    _add_gate_tests(conn)


def _rename_band_tables(conn: Connection) -> None:
    """The tables of bands get new names, and the Bloom filter of the large one goes."""
    names = inspect(conn).get_table_names()
    for old, new in (("openings", "signature_bands"), ("recent_openings", "recent_bands")):
        if old in names:
            conn.execute(text(f"DROP TABLE {new}"))
            conn.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))
    conn.execute(text("DROP TABLE IF EXISTS openings_filter"))


def _add_line_keys(conn: Connection) -> None:
    """Add the keys that task lines have now, as far as a line shows their values.

    In a reply without steps, all input tokens are those of its first model call.
    """
    holds_image = "json_extract(payload, '$.metadata.images_json') <> '[]'"
    used_tools = (
        "json_extract(payload, '$.metadata.tools_json') <> '[]'"
        " OR instr(json_extract(payload, '$.metadata.trajectory_json'), '\"tool_calls\"') > 0"
    )
    conn.execute(
        text(
            "UPDATE tasks SET"  # noqa: S608 - constants
            " model = coalesce(json_extract(payload, '$.metadata.model'), ''),"
            f" excluded = trim(iif({holds_image}, 'image ', '') || iif({used_tools}, 'tools', '')),"
            " payload = json_insert(json_remove(payload, '$.metadata.split'),"
            " '$.metadata.prompt_tokens', iif(json_extract(payload, '$.metadata.trajectory_json') = '[]',"
            " json_extract(payload, '$.metadata.input_tokens'), 0),"
            " '$.metadata.adapter_source', iif(json_extract(payload, '$.metadata.adapter') <> '', 'model', ''),"
            f" '$.metadata.prompt_exact', json(iif({holds_image}, 'false', 'true')),"
            f" '$.metadata.prompt_reason', iif({holds_image}, :image, ''),"
            " '$.metadata.prompt_source', 'trace',"
            " '$.metadata.split', json_extract(payload, '$.metadata.split'))"
            " WHERE json_type(payload, '$.metadata') = 'object'"
        ).bindparams(image=exclusion.IMAGE)
    )
    # Content hashes cover the whole line, and must not differ only because lines have more keys now.
    conn.execute(
        text("UPDATE replies SET content = NULL WHERE source_id IN (SELECT id FROM sources WHERE type <> 'jsonl')")
    )


def _store_beginnings(conn: Connection) -> None:
    """Store how conversations begin: later ones that begin exactly alike follow them from now on.

    If both splits have the same beginning, the conversation in training is followed, and the held-out tasks leave the
    gate.
    """
    conn.execute(text("CREATE TEMP TABLE begun (id INTEGER PRIMARY KEY, key TEXT, split TEXT, beginning INTEGER)"))
    told = select(tasks.c.id, tasks.c.conversation_id, tasks.c.split, tasks.c.payload)
    for rows in conn.execute(told.where(tasks.c.state != TaskState.WITHDRAWN.value)).partitions(_PAGE):
        conn.execute(
            text("INSERT INTO begun VALUES (:id, :key, :split, :beginning)"),
            [
                {
                    "id": row.id,
                    "key": conversation_key(row.conversation_id, row.payload.get("metadata", {}).get("trace_id", "")),
                    "split": row.split,
                    "beginning": beginning_of(row.payload),
                }
                for row in rows
            ],
        )
    for statement in (
        "INSERT OR IGNORE INTO conversations (key, split, \"like\", words) SELECT key, split, key, x'' FROM "
        "(SELECT key, split, min(id) FROM begun GROUP BY key)",
        "INSERT OR IGNORE INTO signature_bands (band, key) SELECT beginning, key FROM "
        "(SELECT beginning, key, min(iif(split = 'train', id, id + (1 << 62))) FROM begun GROUP BY beginning)",
        "UPDATE tasks SET beginning = (SELECT beginning FROM begun WHERE begun.id = tasks.id) "
        "WHERE split = 'held-out'",
    ):
        conn.execute(text(statement))
    both = text("SELECT beginning FROM begun GROUP BY beginning HAVING count(DISTINCT split) > 1")
    leave_gate(conn, set(conn.execute(both).scalars()))
    conn.execute(text("DROP TABLE begun"))


def _add_purposes(conn: Connection) -> None:
    """Usage had no purpose: all of it was filtering. For days without counts, stored verdicts show a part."""
    conn.execute(
        text(
            "INSERT INTO judge_days (day, purpose, calls, prompt_tokens, completion_tokens) "
            "SELECT day, 'filter', calls, prompt_tokens, completion_tokens FROM judge_days_of_6 UNION ALL "
            "SELECT substr(created_at, 1, 10), 'filter', sum(calls), sum(prompt_tokens), sum(completion_tokens) "
            "FROM verdicts WHERE calls > 0 AND substr(created_at, 1, 10) NOT IN (SELECT day FROM judge_days_of_6) "
            "GROUP BY 1"
        )
    )
    conn.execute(text("DROP TABLE judge_days_of_6"))


def _add_gate_tests(conn: Connection) -> None:
    # Each round was tested by itself, at 2.5 %; together they are the first epoch.
    for statement in (
        "INSERT INTO gate_tests (round_id, epoch, number, alpha, conversations) "
        "SELECT id, 1, row_number() OVER (ORDER BY id), 0.025, CASE WHEN tested THEN 0 END "
        "FROM (SELECT id, live, coalesce(json_extract(result, '$.comparison.tasks') > 0, 0) AS tested FROM rounds) "
        "WHERE live = 1 OR tested",
        "INSERT INTO gate_conversations (round_id, conversation) SELECT DISTINCT gate_tests.round_id, "
        "CASE WHEN conversation_id IN ('', 'unknown', '[no_session_id]') "
        "THEN json_extract(payload, '$.metadata.trace_id') ELSE conversation_id END "
        "FROM gate_tests JOIN round_samples USING (round_id) JOIN tasks ON tasks.id = task_id "
        "WHERE round_samples.split = 'held-out' AND conversations = 0",
        "UPDATE gate_tests SET conversations = (SELECT count(*) FROM gate_conversations AS used "
        "WHERE used.round_id = gate_tests.round_id) WHERE conversations = 0",
    ):
        conn.execute(text(statement))


def _to_8(conn: Connection) -> None:
    _add_columns(conn)
    conn.execute(
        text(
            "UPDATE tasks SET payload = json_insert(json_remove(payload, '$.metadata.split'),"
            " '$.metadata.parameters_json', '{}', '$.metadata.split', json_extract(payload, '$.metadata.split'))"
            " WHERE json_type(payload, '$.metadata') = 'object'"
        )
    )
    # As in version 7: content hashes cover the whole line.
    conn.execute(
        text("UPDATE replies SET content = NULL WHERE source_id IN (SELECT id FROM sources WHERE type <> 'jsonl')")
    )


def _to_9(conn: Connection) -> None:
    """Tasks with tools had one exclusion; now it says whether results of their calls are recorded."""
    from flywheel.records.tool_exclusion import exclusion_of_tools

    _add_columns(conn)
    ids = conn.execute(select(tasks.c.id).where(tasks.c.excluded.contains(Exclusion.TOOLS.value))).scalars().all()
    query = select(tasks.c.id, tasks.c.excluded, tasks.c.payload)
    for some in chunks(ids):
        for row in conn.execute(query.where(tasks.c.id.in_(some))).all():
            metadata = row.payload.get("metadata", {})
            tools, steps = (json.loads(metadata.get(name) or "[]") for name in ("tools_json", "trajectory_json"))
            others = set(exclusion.parsed(row.excluded)) - {Exclusion.TOOLS}
            now = exclusion.column(others | ({found} if (found := exclusion_of_tools(tools, steps)) else set()))
            conn.execute(update(tasks).where(tasks.c.id == row.id).values(excluded=now))


def _to_10(conn: Connection) -> None:
    """New tables (labels, requests, texts by hash, costs, errors, supplies, decisions of the gate), and an index."""
    _add_columns(conn)


def _to_11(conn: Connection) -> None:
    """Targets: tasks and rounds have one, and each has a supply of its own. Tasks keep the user's own keys."""
    conn.execute(text("DROP INDEX IF EXISTS tasks_for_rounds"))
    conn.execute(text("ALTER TABLE supplies RENAME TO supplies_of_10"))
    _add_columns(conn, tasks=("target",), rounds=("target",))
    conn.execute(
        text(
            "INSERT INTO supplies (at, usable, needed, waits_for) SELECT at, usable, needed, waits_for"
            " FROM supplies_of_10"
        )
    )
    conn.execute(text("DROP TABLE supplies_of_10"))
    conn.execute(
        text(
            "UPDATE tasks SET payload = json_insert(json_remove(payload, '$.metadata.split'),"
            " '$.metadata.extra_json', '{}', '$.metadata.split', json_extract(payload, '$.metadata.split'))"
            " WHERE json_type(payload, '$.metadata') = 'object'"
        )
    )
    # As in version 7: content hashes cover the whole line.
    conn.execute(
        text("UPDATE replies SET content = NULL WHERE source_id IN (SELECT id FROM sources WHERE type <> 'jsonl')")
    )


MIGRATIONS: Mapping[int, Callable[[Connection], None]] = MappingProxyType(
    {2: _to_2, 3: _to_3, 4: _to_4, 5: _to_5, 6: _to_6, 7: _to_7, 8: _to_8, 9: _to_9, 10: _to_10, 11: _to_11}
)
"""The step to each version from the one before; a new database is created in the present version."""
