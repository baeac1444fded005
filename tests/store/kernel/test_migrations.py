"""An older state becomes the present one, and what it holds stays what it was."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, inspect, select

from flywheel.config import parse
from flywheel.judge.usage import Purpose
from flywheel.records import exclusion
from flywheel.records.exclusion import Exclusion
from flywheel.records.trace import Reply
from flywheel.sources.ingestion import Ingestion
from flywheel.store import gate_tests, ledger, rounds, samples, verdicts
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import (
    SCHEMA_VERSION,
    conversations,
    events,
    metadata,
    recent_bands,
    replies,
    signature_bands,
    sources,
    tasks,
)
from flywheel.store.task_file import TaskFile
from flywheel.store.views import balance, ledger_snapshot, supplies
from tests.samples import batch, reply
from tests.sources.studio.writer import DATA
from tests.training.recorded.recordings import ADD, call, steps, tool

BEFORE_11 = (
    "DROP INDEX tasks_for_rounds; ALTER TABLE tasks DROP COLUMN target; ALTER TABLE rounds DROP COLUMN target;"
    "CREATE INDEX tasks_for_rounds ON tasks (state, split, excluded); DROP TABLE supplies;"
    "CREATE TABLE supplies (at TEXT PRIMARY KEY, usable INTEGER NOT NULL, needed INTEGER NOT NULL,"
    " waits_for TEXT NOT NULL);"
    "UPDATE tasks SET payload = json_remove(payload, '$.metadata.extra_json');"
)
"""Makes a present state one of before version 11, but for its number."""
BEFORE_10 = (
    f"{BEFORE_11}"
    "DROP INDEX verdicts_by_rubric; DROP TABLE judge_costs; DROP TABLE judge_errors;"
    "DROP TABLE rubric_texts; DROP TABLE judge_models;"
    "DROP TABLE labels; DROP TABLE requests; DROP TABLE supplies; DROP TABLE gate_decisions;"
)
"""Makes a present state one of before version 10, but for its number."""
BEFORE_8 = (
    f"{BEFORE_10} DROP TABLE reply_calls;"
    "UPDATE tasks SET payload = json_remove(payload, '$.metadata.parameters_json');"
)
"""Makes a present state one of before version 8, but for its number."""
BEFORE_7 = (
    f"{BEFORE_8}"
    "DROP INDEX tasks_for_rounds; DROP INDEX tasks_by_beginning; DROP INDEX conversations_joined;"
    "DROP INDEX tasks_suspected; ALTER TABLE tasks DROP COLUMN crashes;"
    "ALTER TABLE tasks DROP COLUMN excluded; ALTER TABLE tasks DROP COLUMN model;"
    "ALTER TABLE tasks DROP COLUMN beginning; ALTER TABLE conversations DROP COLUMN exact;"
    "ALTER TABLE rounds DROP COLUMN usage_read; DROP TABLE judge_days;"
    "CREATE TABLE judge_days (day TEXT PRIMARY KEY, calls INTEGER NOT NULL, prompt_tokens BIGINT NOT NULL,"
    " completion_tokens BIGINT NOT NULL);"
    "DROP TABLE gate_conversations; DROP TABLE gate_tests;"
    "ALTER TABLE signature_bands RENAME TO openings; ALTER TABLE recent_bands RENAME TO recent_openings;"
    "CREATE TABLE openings_filter (id INTEGER PRIMARY KEY, stamp BIGINT, bands BIGINT, bits BLOB);"
)
"""Makes a present state one of before version 7, but for its number."""
OLD = Path(__file__).parents[2] / "data" / "state_v1.sql"


def layout(conn: Connection) -> dict[str, set[str]]:
    look = inspect(conn)
    return {name: {column["name"] for column in look.get_columns(name)} for name in look.get_table_names()}


def indexes(conn: Connection) -> dict[str, set[str | None]]:
    look = inspect(conn)
    return {name: {index["name"] for index in look.get_indexes(name)} for name in look.get_table_names()}


def put(conn: Connection, *replies: Reply) -> None:
    ledger.record_batch(conn, ledger.source_id(conn, "/a"), batch(*replies), train_ratio=0.5, split_seed=1)


def old_state(folder: Path) -> None:
    """As the first release left it after it had read a database: a reply without its content, a cursor at the end."""
    folder.mkdir()
    database = sqlite3.connect(folder / "state.db")
    database.executescript(OLD.read_text())
    database.execute(
        "INSERT INTO sources (id, path, schema, identity, fingerprint, generation, rowid_done, open_traces, "
        "longest_read_ms, error, warning) VALUES (1, ?, 'generation 2', 'old', 'old', 0, 999, 0, 0, '', '')",
        (str(DATA / "new_v2.sqlite"),),
    )
    database.execute(
        "INSERT INTO replies (id, source_id, span_id, trace_id, conversation_id, agent, state, skip_reason, detail, "
        "created_at) VALUES (1, 1, 'gone', 't', 'c', 'a', 'skipped', 'error', 'it failed', '2026-01-01')"
    )
    database.commit()
    database.close()


async def test_version_1_grows_into_the_present_schema(tmp_path: Path) -> None:
    old_state(tmp_path / "old")
    old = await Store.open(tmp_path / "old")
    new = await Store.open(tmp_path / "new")
    try:
        grown = await old.read(layout)
        assert (
            grown
            == await new.read(layout)
            == {table.name: {column.name for column in table.columns} for table in metadata.sorted_tables}
        )
        assert await old.read(indexes) == await new.read(indexes)
        rows = await old.read(lambda conn: conn.execute(select(sources.c.rowid_done, sources.c.condition)).all())
        assert [tuple(row) for row in rows] == [(0, "")], "read anew once: the keys stop duplicates"
        assert (await old.read(balance.balance)).balanced
    finally:
        await old.close()
        await new.close()


async def test_conversations_of_version_3_are_still_found(tmp_path: Path) -> None:
    """Their bands are kept; those that follow another one are counted by an index of their own."""
    query = "A train travels at 150 km/h for 7 hours. How many kilometres does it cover?"
    store = await Store.open(tmp_path / "state")
    await store.write(put, reply(1, query=query))
    await store.close()
    database = sqlite3.connect(tmp_path / "state" / "state.db")
    database.executescript(
        f"{BEFORE_7} INSERT INTO openings SELECT band, key FROM recent_openings; DROP TABLE recent_openings;"
        "DROP TABLE openings_filter;"
        'CREATE INDEX ix_conversations_like ON conversations ("like");'
        "UPDATE meta SET value = 3 WHERE key = 'schema_version'; UPDATE conversations SET split = 'held-out'"
    )
    database.close()
    store = await Store.open(tmp_path / "state")
    try:
        for number in range(2, 9):
            await store.write(put, reply(number, query=query.upper() + "?" * number))
        splits = await store.read(
            lambda conn: conn.execute(select(conversations.c.split, conversations.c.like)).all()
        )
        assert [tuple(row) for row in splits] == [("held-out", splits[0].like)] * 8
        assert "ix_conversations_like" not in (await store.read(indexes))["conversations"]
    finally:
        await store.close()


async def test_bands_of_both_tables_of_version_6_are_kept(tmp_path: Path) -> None:
    tables = (signature_bands, recent_bands)

    def bands(conn: Connection) -> list[list[tuple[int, str]]]:
        return [[tuple(row) for row in conn.execute(select(table).order_by(table.c.band))] for table in tables]

    store = await Store.open(tmp_path / "state")
    await store.write(put, *(reply(number) for number in range(5)))
    await store.write(lambda conn: conn.execute(insert(signature_bands).values(band=1, key="conversation-1")))
    before = await store.read(bands)
    await store.close()
    as_version_6(tmp_path / "state" / "state.db")
    store = await Store.open(tmp_path / "state")
    try:
        large, recent = await store.read(bands)
        assert (1, "conversation-1") in large, "beside the beginnings that the migration notes"
        assert recent == before[1] and len(recent) == 55
    finally:
        await store.close()


async def test_what_was_written_to_the_task_file_is_not_written_again(tmp_path: Path) -> None:
    old_state(tmp_path / "state")
    database = sqlite3.connect(tmp_path / "state" / "state.db")
    for number, is_exported in ((1, True), (2, True), (3, False)):
        database.execute(
            "INSERT INTO tasks (id, key, conversation_id, agent, adapter, started_at, split, state, payload, "
            "exported, created_at) "
            "VALUES (?, ?, 'c', 'a', '', '2026-01-01', 'train', 'pending', ?, ?, '2026-01-01')",
            (number, f"t-{number}", f'{{"task_id":"t-{number}"}}', is_exported),
        )
    database.commit()
    database.close()
    store = await Store.open(tmp_path / "state")
    try:
        assert await TaskFile(tmp_path / "tasks.jsonl").follow(store) == 1
        assert (tmp_path / "tasks.jsonl").read_text() == '{"task_id":"t-3"}\n'
        assert await TaskFile(tmp_path / "tasks.jsonl").follow(store) == 0
        assert await store.read(ledger_snapshot.exported) == {"t-1": 1, "t-2": 2, "t-3": 3}
    finally:
        await store.close()


async def test_a_state_that_was_migrated_goes_on(tmp_path: Path) -> None:
    old_state(tmp_path / "state")
    config = parse({"state": {"dir": "state"}, "sources": [{"path": str(DATA / "new_v2.sqlite")}]}, "test", tmp_path)
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    for new in (97, 0):
        (report,) = await ingestion.run(final=True)
        assert (report.error, report.counts.replies, report.new) == (None, 106, new)
    assert SCHEMA_VERSION == 11
    await ingestion.close()
    await store.close()


async def test_tasks_of_version_6_say_what_is_exact_and_what_excludes_them(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    offered = {"type": "function", "function": {"name": "add"}}
    told = [
        reply(
            1, model="m", adapter="a@r0001", input_tokens=7, history=({"role": "system", "content": "é\ud83d\x01/"},)
        ),
        reply(2, images=("https://example.org/cat.png",)),
        reply(3, tools=(offered,), input_tokens=9),
        reply(4, trajectory=({"role": "assistant", "content": "", "tool_calls": [call]},), input_tokens=9),
    ]
    store = await Store.open(tmp_path / "state")
    await store.write(put, *told)
    lines = await store.read(lambda conn: conn.execute(select(tasks.c.payload).order_by(tasks.c.id)).scalars().all())
    await store.close()
    as_version_6(tmp_path / "state" / "state.db")
    store = await Store.open(tmp_path / "state")
    try:
        query = select(tasks.c.payload, tasks.c.excluded, tasks.c.model, tasks.c.crashes).order_by(tasks.c.id)
        rows = await store.read(lambda conn: conn.execute(query).all())
        assert [row.excluded for row in rows] == ["", "image", "uncalled", "unrecorded"]
        assert [row.model for row in rows] == ["m", "", "", ""]
        assert [row.crashes for row in rows] == [0] * 4
        tokens = [7, 0, 9, 0]
        for row, line, first in zip(rows, lines, tokens, strict=True):
            line["metadata"] |= {"prompt_tokens": first, "adapter_source": "model" if row.model else ""}
            assert row.payload == line
            assert list(row.payload["metadata"])[-1] == "split"
        contents = await store.read(lambda conn: conn.execute(select(replies.c.content)).scalars().all())
        assert contents == [None] * 4
        await store.write(put, *told)
        changed = select(events.c.id).where(events.c.new == "changed")
        assert (await store.read(lambda conn: conn.execute(changed).all())) == []
    finally:
        await store.close()


def as_version_6(path: Path) -> None:
    """What this version has that the one before had not is taken away."""
    database = sqlite3.connect(path)
    keys = ("prompt_tokens", "adapter_source", "prompt_exact", "prompt_reason", "prompt_source")
    removed = ", ".join(f"'$.metadata.{key}'" for key in keys)
    database.executescript(
        BEFORE_7
        + "ALTER TABLE tasks ADD COLUMN images BOOLEAN DEFAULT 0 NOT NULL;"
        + "CREATE INDEX tasks_with_images ON tasks (state, split, images) WHERE images = 1;"
        + f"UPDATE tasks SET payload = json_remove(payload, {removed});"
        + "UPDATE meta SET value = 6 WHERE key = 'schema_version'"
    )
    database.close()


async def test_what_version_6_put_on_both_sides_leaves_the_gate_and_is_followed_in_training(tmp_path: Path) -> None:
    """Its tasks stay where they are. What was on one side only goes on there."""
    query = "A train travels at 150 km/h for 7 hours. How many kilometres does it cover?"
    store = await Store.open(tmp_path / "state")
    await store.write(put, *(reply(n, query=query) for n in range(8)), *(reply(n) for n in range(20, 40)))
    await store.close()
    database = sqlite3.connect(tmp_path / "state" / "state.db")
    database.executescript(
        "UPDATE conversations SET split = CASE WHEN key < 'conversation-6' THEN 'held-out' ELSE 'train' END "
        "WHERE key IN (SELECT conversation_id FROM tasks WHERE id <= 8);"
        "UPDATE tasks SET state = 'accepted', split = (SELECT split FROM conversations WHERE key = conversation_id);"
        'DELETE FROM recent_bands; UPDATE conversations SET "like" = key;'
    )
    alone = {key for (key,) in database.execute("SELECT key FROM conversations WHERE split = 'held-out'")}
    before = dict(database.execute("SELECT conversation_id, split FROM tasks"))
    database.close()
    as_version_6(tmp_path / "state" / "state.db")
    alone -= {f"conversation-{number}" for number in range(8)}
    assert alone
    store = await Store.open(tmp_path / "state")
    try:
        assert await store.read(samples.count_held_out) == len(alone)
        assert await store.read(samples.count_left_out) == {Exclusion.REPEATED: 6}
        gate = [number for number, _ in await store.read(gate_tests.candidates, 100)]
        sides = await store.read(lambda conn: conn.execute(select(tasks.c.conversation_id, tasks.c.split)).all())
        assert {row.conversation_id: row.split for row in sides} == before
        named = await store.read(
            lambda conn: conn.execute(select(tasks.c.conversation_id).where(tasks.c.id.in_(gate))).scalars().all()
        )
        assert set(named) == alone
        for number in range(100, 110):
            again = next(int(key.rpartition("-")[2]) for key in sorted(alone))
            await store.write(put, reply(number, query=query), reply(100 + number, query=f"What is {again} plus 1?"))
        sides = await store.read(lambda conn: conn.execute(select(tasks.c.conversation_id, tasks.c.split)).all())
        found = {row.conversation_id: row.split for row in sides}
        assert {found[f"conversation-{number}"] for number in range(100, 110)} == {"train"}
        assert {found[f"conversation-{number}"] for number in range(200, 210)} == {"held-out"}
    finally:
        await store.close()


async def test_what_the_judge_was_used_for_before_version_7_was_filtering(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "state")
    await store.write(put, reply(1), reply(2))
    await store.close()
    as_version_6(tmp_path / "state" / "state.db")
    database = sqlite3.connect(tmp_path / "state" / "state.db")
    database.executescript(
        "INSERT INTO judge_days VALUES ('2026-01-02', 3, 300, 30);"
        "INSERT INTO verdicts (task_id, rubric_hash, judge_hash, outcome, results, reason, error, calls,"
        " prompt_tokens, completion_tokens, latency_seconds, created_at) VALUES"
        " (1, 'r', 'j', 'accepted', '[]', '', '', 2, 200, 20, 1, '2026-01-02T10:00:00.000+00:00'),"
        " (2, 'r', 'j', 'accepted', '[]', '', '', 4, 400, 40, 1, '2026-01-01T10:00:00.000+00:00');"
    )
    database.close()
    store = await Store.open(tmp_path / "state")
    try:
        found = await store.read(verdicts.usage_by_purpose)
        assert found[Purpose.FILTER] == {"calls": 7, "prompt_tokens": 700, "completion_tokens": 70}
        assert all(not found[purpose]["calls"] for purpose in Purpose if purpose is not Purpose.FILTER)
    finally:
        await store.close()


@pytest.mark.parametrize(("version", "before"), [(7, BEFORE_8), (10, BEFORE_11)])
async def test_tasks_get_the_keys_of_later_versions_and_change_no_more(
    version: int, before: str, tmp_path: Path
) -> None:
    told = [reply(1), reply(2, images=("https://example.org/cat.png",))]
    store = await Store.open(tmp_path / "state")
    await store.write(put, *told)
    lines = await store.read(lambda conn: conn.execute(select(tasks.c.payload).order_by(tasks.c.id)).scalars().all())
    await store.close()
    database = sqlite3.connect(tmp_path / "state" / "state.db")
    database.executescript(f"{before} UPDATE meta SET value = {version} WHERE key = 'schema_version'")
    database.close()
    store = await Store.open(tmp_path / "state")
    try:
        query = select(tasks.c.payload).order_by(tasks.c.id)
        found = await store.read(lambda conn: conn.execute(query).scalars().all())
        assert found == lines
        keys = ["parameters_json", "extra_json", "split"]
        assert [list(line["metadata"])[-3:] for line in found] == [keys] * 2
        await store.write(put, *told)
        changed = select(events.c.id).where(events.c.new == "changed")
        assert (await store.read(lambda conn: conn.execute(changed).all())) == []
    finally:
        await store.close()


async def test_tasks_of_version_8_say_what_of_their_tools_is_recorded(tmp_path: Path) -> None:
    made = steps((call(arguments={"a": 1}), "1"))
    told = [
        reply(1),
        reply(2, tools=(ADD,), trajectory=made, images=("https://example.org/cat.png",)),
        reply(3, tools=(ADD,)),
        reply(4, tools=(ADD,), trajectory=steps((call(), None)), prompt_reason=exclusion.HIDDEN_MESSAGE),
        reply(5, tools=(tool("other"),), trajectory=made),
    ]
    store = await Store.open(tmp_path / "state")
    await store.write(put, *told)
    query = select(tasks.c.excluded, tasks.c.payload).order_by(tasks.c.id)
    now = [tuple(row) for row in await store.read(lambda conn: conn.execute(query).all())]
    await store.close()
    assert [excluded for excluded, _ in now] == ["", "image tools", "uncalled", "hidden unrecorded", "unrecorded"]
    database = sqlite3.connect(tmp_path / "state" / "state.db")
    database.executescript(
        "UPDATE tasks SET excluded = replace(replace(excluded, 'uncalled', 'tools'), 'unrecorded', 'tools');"
        "UPDATE tasks SET excluded = excluded || ' repeated' WHERE id = 4;"
        "UPDATE meta SET value = 8 WHERE key = 'schema_version'"
    )
    database.close()
    store = await Store.open(tmp_path / "state")
    try:
        found = [tuple(row) for row in await store.read(lambda conn: conn.execute(query).all())]
        assert found[3] == ("hidden unrecorded repeated", now[3][1])
        assert [*found[:3], found[4]] == [*now[:3], now[4]]
        await store.write(put, *told)
        changed = select(events.c.id).where(events.c.new == "changed")
        assert (await store.read(lambda conn: conn.execute(changed).all())) == []
    finally:
        await store.close()


async def test_a_state_of_version_10_has_one_target(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "state")
    now = await store.read(layout), await store.read(indexes)
    await store.write(put, reply(1))
    await store.close()
    database = sqlite3.connect(tmp_path / "state" / "state.db")
    database.executescript(
        f"{BEFORE_11} UPDATE meta SET value = 10 WHERE key = 'schema_version';"
        "INSERT INTO supplies VALUES ('2026-01-01T00:00:00.000+00:00', 3, 4, '3 of 4 samples are free');"
        'INSERT INTO rounds (name, state, "trigger", attempt, config_hash, rubric_hash, seed, dir, reason, '
        "created_at) VALUES ('r0001', 'rejected', 'test', 1, 'c', 'r', 1, '/r', '', '2026-01-01T00:00:00.000+00:00')"
    )
    database.close()
    store = await Store.open(tmp_path / "state")
    try:
        assert (await store.read(layout), await store.read(indexes)) == now
        (supply,) = await store.read(supplies.newest)
        assert (supply.usable, supply.target) == (3, "")
        assert [row.target for row in await store.read(rounds.newest, 9)] == [""]
        assert await store.read(samples.count_left_out) == {}
        await store.write(supplies.note, 1, 2, "1 of 2 samples are free", "planner")
        assert len(await store.read(supplies.newest)) == 1
    finally:
        await store.close()
