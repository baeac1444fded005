"""One row that cannot be understood is one dead row, and nothing else changes."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flywheel.config.file import parse
from flywheel.records.privacy import PrivateNames
from flywheel.records.task import Batch
from flywheel.records.trace import Cursor, Reply, ReplySelection
from flywheel.sources import studio_connector
from flywheel.sources.spans import replies
from flywheel.sources.spans.span import Span
from flywheel.sources.spans.trace_tree import Tree
from flywheel.sources.studio import database, reader, schema
from flywheel.sources.studio_connector import StudioConnector
from flywheel.store.kernel.database import Store
from tests.sources.studio.reading import by_id, raw_traces, read_all
from tests.sources.studio.writer import (
    Studio,
    agent,
    chat,
    empty_like,
    insert,
    message,
    part,
    rows,
    span,
    tool,
)


def poison(column: str, value: Any) -> dict[str, Any]:
    return {**agent("poison", trace="poisoned"), column: value}


def without_constraints(path: Path) -> None:
    """Have the table take whatever it is given, as one does that another tool has written."""
    with sqlite3.connect(path) as database:
        names = [name for (name,) in database.execute("SELECT name FROM pragma_table_info('span_table')")]
        for (view,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'view'").fetchall():
            database.execute(f"DROP VIEW {view}")
        database.execute("DROP TABLE span_table")
        database.execute(f"CREATE TABLE span_table ({', '.join(names)})")
    database.close()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (poison("attributes", "{broken"), "attributes is not JSON"),
        (poison("attributes", ""), "attributes is not JSON"),
        (poison("attributes", "[1, 2]"), "not an object"),
        (poison("attributes", '"text"'), "not an object"),
        (poison("attributes", 7.5), "attributes is a"),
        (poison("attributes", b'{"a": "\xff\xfe"}'), "UTF-8"),
        (poison("attributes", "[" * 200_000), "attributes is not JSON"),
        (poison("events", "{broken"), "events is not JSON"),
        (poison("status", "nonsense"), "status is not JSON"),
        (poison("traceId", b"\xff"), "UTF-8"),
        (poison("traceId", ""), "traceId is empty"),
        (poison("startTimeUnixNano", "yesterday"), "startTimeUnixNano"),
        (poison("startTimeUnixNano", "-5"), "out of range"),
        (poison("endTimeUnixNano", "9" * 30), "out of range"),
        (agent("poison", trace="poisoned", began=5, ended=3), "it ended 2 s before it began"),
        (poison("attributes", None), "attributes"),
        (poison("endTimeUnixNano", None), "endTimeUnixNano"),
        (poison("startTimeUnixNano", b"\xff"), "startTimeUnixNano"),
        (poison("name", b"\xff\xfe"), "UTF-8"),
        (poison("status", b'{"code": "\xff"}'), "UTF-8"),
        (poison("conversationId", 5.5), "conversationId is a"),
        (poison("parentSpanId", "poison"), "circle"),
        (
            agent("poison", "q", [message("assistant", part("a"))], trace="poisoned") | {"parentSpanId": "poison"},
            "circle",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_row_costs_itself(studio: Studio, bad: dict[str, Any], why: str) -> None:
    without_constraints(studio.path)
    studio.write(agent("before", trace="1"), bad, agent("after", trace="2"))
    replies, dead, batches = read_all(studio.path)
    (row,) = dead
    assert (row.rowid, row.span_id) == (2, "poison")
    assert why in row.error
    assert len(row.excerpt) <= 500
    assert sorted(by_id(replies)) == ["after", "before"]
    assert batches[-1].cursor.rowid == 3


def test_a_bad_row_belongs_to_whom_it_or_its_trace_names(studio: Studio) -> None:
    torn = '{"user": {"id": "ann"}, "gen_ai": {"input": ['
    studio.write(
        span("alone", "invoke_agent", torn, trace="1", conversation="secret talk"),
        span("bad", "invoke_agent", "{torn", trace="2", conversation=""),
        span("other", "chat", {"enduser": {"id": "bob"}}, trace="2", conversation="talk", parent="bad"),
    )
    _, dead, _ = read_all(studio.path)
    assert {row.span_id: (row.conversation_id, row.user) for row in dead} == {
        "alone": ("secret talk", "ann"),
        "bad": ("talk", "bob"),
    }
    for names in (PrivateNames(users=frozenset({"ann"})), PrivateNames(conversations=frozenset({"secret talk"}))):
        _, dead, _ = read_all(studio.path, selection=ReplySelection(private=names))
        assert [(row.excerpt, row.conversation_id, row.user) for row in dead if row.span_id == "alone"] == [
            ("", "", "")
        ]


@pytest.mark.parametrize("name", ["old", "new_v1", "new_v2", "new_oldclient"])
def test_poison_of_every_kind_among_real_rows(name: str, tmp_path: Path) -> None:
    path = empty_like(name, tmp_path / "studio.sqlite")
    insert(path, rows(name))
    expected = by_id(read_all(path)[0])
    bad = ["{broken", "[]", b"\xff", "null", "12"]
    with sqlite3.connect(path) as database:
        (tail,) = database.execute("SELECT max(rowid) FROM span_table").fetchone()
        columns = [row[1] for row in database.execute("PRAGMA table_info(span_table)")]
        for number, value in enumerate(bad):
            copied = ", ".join(f"'p{number}'" if c in ("id", "spanId", "traceId") else c for c in columns)
            database.execute(
                f"INSERT INTO span_table ({', '.join(columns)}) SELECT {copied} FROM span_table WHERE rowid = 1"
            )
            database.execute(f"UPDATE span_table SET attributes = ? WHERE id = 'p{number}'", (value,))
    database.close()
    replies, dead, _ = read_all(path)
    assert by_id(replies) == expected
    assert [row.rowid for row in dead] == list(range(tail + 1, tail + 1 + len(bad)))


def test_a_circle_of_three_and_what_hangs_from_it(studio: Studio) -> None:
    studio.write(
        agent("leaf", parent="x"),
        span("x", None, {}, parent="y"),
        span("y", None, {}, parent="z"),
        span("z", None, {}, parent="x"),
    )
    replies, dead, _ = read_all(studio.path)
    assert sorted(row.span_id for row in dead) == ["x", "y", "z"]
    assert [(reply.span_id, reply.skip) for reply in replies] == [("leaf", None)]


def test_children_of_a_dead_agent_do_not_wait_for_it(studio: Studio) -> None:
    studio.write(chat("c", [message("user", part("q"))], "a", parent="dead"), {**agent("dead"), "attributes": "{"})
    replies, dead, batches = read_all(studio.path)
    assert replies == []
    assert [row.span_id for row in dead] == ["dead"]
    assert batches[-1].open_traces == 0


def test_a_garbled_message_is_one_dead_reply(studio: Studio) -> None:
    cut = {"gen_ai": {"agent": {"name": "A"}}, "agentscope": {"function": {"output": "Msg(id='x', content='cut o"}}}
    studio.write(span("cut", "invoke_agent", cut, trace="1"), agent("fine", trace="2"))
    replies, dead, _ = read_all(studio.path)
    assert list(by_id(replies)) == ["fine"]
    (row,) = dead
    assert row.span_id == "cut" and "Python repr" in row.error


WEIRD: list[Any] = [
    None,
    0,
    7,
    "text",
    [],
    {},
    [None],
    [[1]],
    {"a": 1},
    [{"role": 5}],
    {"parts": 3},
    {"content": {}},
    True,
]


@pytest.mark.parametrize("value", WEIRD, ids=repr)
def test_attributes_of_any_shape_never_raise(studio: Studio, value: Any) -> None:
    paths: list[Any] = [
        value,
        {"gen_ai": value},
        {
            "gen_ai": {
                "input": value,
                "output": value,
                "agent": value,
                "tool": value,
                "usage": value,
                "response": value,
            }
        },
        {"gen_ai": {"input": {"messages": value}, "output": {"messages": value}, "tool": {"call": value}}},
        {"gen_ai": {"tool": {"definitions": value, "call": {"id": value, "arguments": value, "result": value}}}},
        {"gen_ai": {"request": {"model": value}, "response": {"model": value, "finish_reasons": value}}},
        {"gen_ai": {"usage": {"input_tokens": value, "output_tokens": value}}},
        {"agentscope": value},
        {"agentscope": {"function": {"input": value, "output": value}}},
        {"agentscope": {"function": {"input": {"args": value, "kwargs": value}, "output": {"content": value}}}},
        {"input": {"kwargs": {"msg": value, "tools": value, "messages": value}}, "metadata": value, "output": value},
        {"gen_ai": {"operation": {"name": value}}},
    ]
    spans = []
    for number, attributes in enumerate(paths):
        trace = f"t{number}"
        for operation in ("chat", "execute_tool", "format"):
            events = [value, {"name": "exception", "attributes": value}]
            spans.append(
                span(f"{operation}{number}", operation, attributes, parent=f"a{number}", trace=trace, events=events)
            )
        spans.append(span(f"a{number}", "invoke_agent", attributes, trace=trace, ended=2, events=[value]))
    studio.write(*spans, agent("fine", trace="fine"))
    replies, dead, batches = read_all(studio.path)
    accounted = {reply.span_id for reply in replies} | {row.span_id for row in dead}
    assert accounted >= {f"a{number}" for number in range(len(paths))}
    assert by_id(replies)["fine"].skip is None
    assert batches[-1].open_traces == 0


def test_a_huge_row_is_dead_and_the_rest_flows(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_CELL", 10_000)
    monkeypatch.setattr(database, "MAX_CELL", 10_000)
    studio.write(agent("huge", "q" * 20_000, trace="1"), agent("fine", trace="2"))
    replies, dead, _ = read_all(studio.path)
    assert [reply.span_id for reply in replies] == ["fine"]
    assert "more than 10,000" in dead[0].error


def test_what_json_allows_and_few_parsers_do(studio: Studio) -> None:
    text = agent("a")["attributes"].replace("What is 1 + 1?", "\\ud83d 1 \\u0000").replace('"2"', '"\\udc00 2"')
    studio.write(span("a", "invoke_agent", text))
    replies, dead, _ = read_all(studio.path)
    assert dead == []
    assert (replies[0].query, replies[0].answer) == ("\ud83d 1 \x00", "\udc00 2")


def test_shared_ids_that_are_no_conversations_link_nothing(studio: Studio) -> None:
    studio.write(
        agent("a1", "first", "1", trace="1", conversation="unknown"),
        agent("a2", "second", "2", trace="2", conversation="unknown", began=2, ended=3),
        agent("a3", "third", "3", trace="3", conversation="[no_session_id]", began=4, ended=5),
        tool("t", "c", "add", "2", trace="4", conversation="unknown"),
    )
    replies, _, _ = read_all(studio.path)
    found: dict[str, Reply] = by_id(replies)
    assert all(reply.history == () and reply.turn == 0 for reply in found.values())
    assert [found[key].conversation_id for key in ("a1", "a3")] == ["unknown", "[no_session_id]"]


def test_a_null_in_any_column_costs_one_row_at_most(studio: Studio) -> None:
    without_constraints(studio.path)
    whole = agent("whole", trace="0")
    rows_ = [{**agent(f"a{number}", trace=f"t{number}"), column: None} for number, column in enumerate(whole)]
    studio.write(whole, *rows_, agent("last", trace="last"))
    replies, dead, batches = read_all(studio.path)
    found = by_id(replies)
    assert found["whole"].skip is None and found["last"].skip is None
    assert len(found) + len(dead) == len(rows_) + 2
    assert len(dead) == len({row.rowid for row in dead})
    assert batches[-1].open_traces == 0


def test_columns_that_are_not_known_are_passed_over(studio: Studio) -> None:
    with sqlite3.connect(studio.path) as database:
        database.execute("ALTER TABLE span_table ADD COLUMN mood TEXT DEFAULT 'fine'")
        database.execute("ALTER TABLE span_table ADD COLUMN spanKinds BLOB")
    database.close()
    studio.write(agent("a1"))
    replies, dead, _ = read_all(studio.path)
    assert (list(by_id(replies)), dead) == (["a1"], [])


MEASURED = """
import pathlib, runpy, sys
sys.argv = ["flywheel", *sys.argv[1:]]
try:
    runpy.run_module("flywheel", run_name="__main__")
finally:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")), file=sys.stderr)
"""
"""Prints the most memory that the command held, in KiB."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's own measure of memory")
@pytest.mark.parametrize("name", [pytest.param("old", marks=pytest.mark.extended), "new_v2"])
def test_a_hundred_megabytes_in_a_row_cost_a_letter_and_little_memory(name: str, tmp_path: Path) -> None:
    path = empty_like(name, tmp_path / "studio.sqlite")
    insert(path, rows(name))
    config = tmp_path / "flywheel.yaml"
    config.write_text(json.dumps({"state": {"dir": "state"}, "sources": [{"path": str(path)}]}))

    def flywheel(*arguments: str) -> tuple[dict[str, Any], int]:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *arguments, "--json", "-c", str(config)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), int(done.stderr.split()[-1])

    report, usual = flywheel("ingest")
    told = report["sources"][0]["replies"]
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA journal_mode = OFF")
        columns = [row[1] for row in database.execute("PRAGMA table_info(span_table)")]
        kept = [column for column in columns if column not in ("id", "traceId", "attributes", "events")]
        for number, huge in enumerate(("attributes", "attributes", "events")):
            small = {"attributes": "'{}'", "events": "'[]'"} | {huge: "'{' || hex(zeroblob(50000000))"}
            database.execute(
                f"INSERT INTO span_table (id, traceId, attributes, events, {', '.join(kept)}) SELECT 'huge{number}', "
                f"'t{number}', {small['attributes']}, {small['events']}, {', '.join(kept)} FROM span_table LIMIT 1"
            )
        (after,) = rows(name)[:1]
        insert_after = ("after", "after", *after[2:])
        database.execute(f"INSERT INTO span_table VALUES ({','.join('?' * len(after))})", insert_after)
    database.close()
    report, kilobytes = flywheel("ingest")
    (of,) = report["sources"]
    # The last row's parent is not in its trace: one more reply, which is unfinished.
    assert (of["replies"], of["dead"]) == (told + 4, 3)
    assert kilobytes < usual + 90_000, "a value was loaded"
    letters, _ = flywheel("dead-letters")
    assert sorted(letter["subject"] for letter in letters["letters"]) == ["huge0", "huge1", "huge2"]
    assert all("100,000,001 bytes" in letter["error"] for letter in letters["letters"])
    again, kilobytes = flywheel("ingest", "--sweep")
    assert again["new"] == 0 and again["sources"][0]["dead"] == 3
    assert kilobytes < usual + 90_000, "a value was loaded"


def recorded(output: str) -> dict[str, Any]:
    """A reply of a 1.x client, which records the returned message as its repr."""
    call = {"input": {"args": [], "kwargs": {"msg": "q", "structured_model": "<class 'M'>"}}, "output": output}
    gen_ai = {"operation": {"name": "invoke_agent"}, "agent": {"name": "Solver"}}
    return span("odd", "invoke_agent", {"gen_ai": gen_ai, "agentscope": {"function": call}}, trace="odd")


async def entries_of_all(studio: Studio, folder: Path, *, in_process: bool) -> list[Batch]:
    config = parse({"state": {"dir": "state"}, "sources": [{"path": str(studio.path)}]}, "the test's", folder)
    store = await Store.open(folder / "state")
    connector = StudioConnector(studio.path, config, store)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(studio_connector, "LONG_ROWS", 5 if in_process else 10**9)
            patch.setattr(reader, "BATCH_ROWS", 5)
            patch.setattr(database, "PAGE_ROWS", 5)
            return [batch async for batch in connector.read(1, Cursor(), final=True)]
    finally:
        await connector.close()
        await store.close()


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [False, True])
async def test_what_json_has_no_form_for_is_text(studio: Studio, tmp_path: Path, in_process: bool) -> None:
    metadata = "{'png': b'abc', 'cycle': {...}, 'z': 1j, 'n': -1, 'none': None}"
    output = f"Msg(id='m', name='S', content='fine', role='assistant', metadata={metadata}, timestamp='t')"
    studio.write(agent("a", trace="a"), recorded(output), *(agent(f"b{n}", trace=f"b{n}") for n in range(30)))
    batches = await entries_of_all(studio, tmp_path, in_process=in_process)
    assert [row for batch in batches for row in batch.dead] == []
    lines = {entry.span_id: json.loads(entry.line) for batch in batches for entry in batch.entries}
    assert len(lines) == 32
    structured = json.loads(lines["odd"]["metadata"]["structured_json"])
    assert structured == {"png": "b'abc'", "cycle": ["..."], "z": "1j", "n": -1, "none": None}


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [False, True])
async def test_half_an_emoji_in_what_cannot_be_read_is_one_dead_row(
    studio: Studio, tmp_path: Path, in_process: bool
) -> None:
    studio.write(
        agent("a", trace="a"),
        recorded("Msg(id='\ud800', broken"),
        *(agent(f"b{n}", trace=f"b{n}") for n in range(30)),
    )
    batches = await entries_of_all(studio, tmp_path, in_process=in_process)
    (dead,) = (row for batch in batches for row in batch.dead)
    assert dead.span_id == "odd" and "no Python repr" in dead.error and dead.error.encode()
    assert sum(len(batch.entries) for batch in batches) == 31


def test_a_reply_that_cannot_be_written_is_dead_by_itself(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    studio.write(*(agent(f"a{n}", trace=f"t{n}") for n in range(5)))
    schema, traces = raw_traces(studio.path)
    finished = replies.finished_reply

    def odd(tree: Tree, span: Span, selection: ReplySelection) -> Reply:
        reply = finished(tree, span, selection)
        return replace(reply, structured={"object": object()}) if span.span_id == "a2" else reply

    monkeypatch.setattr(replies, "finished_reply", odd)
    told = replies.extract(traces, schema, ReplySelection(), "a.sqlite")
    assert [entry.span_id for entry in told.entries] == ["a0", "a1", "a3", "a4"]
    (dead,) = told.dead
    assert (dead.span_id, dead.trace_id) == ("a2", "t2") and "cannot be written as JSON" in dead.error
