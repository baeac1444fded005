"""Replies of which the state has nothing but a count, in every kind of source, and their recorded calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, select

from flywheel.config.file import Config, load
from flywheel.errors import ConfigError
from flywheel.serving.calls.call_log import call_log_copy_path
from flywheel.sources.call_puller import CallLogCopy
from flywheel.sources.otlp.inbox import Inbox, inbox_path
from flywheel.sources.otlp.rows import rows_of
from flywheel.store import ledger
from flywheel.store.kernel.schema import replies, reply_calls, tasks
from tests.factories import state
from tests.factories.call_log import stored
from tests.factories.config import write_config
from tests.factories.recorded_reply import asked, call, config_of, mark_of, trace
from tests.factories.state import deep_audited, open_state
from tests.sources.calls.log_server import LogServer
from tests.sources.otlp.exporting import request, span
from tests.sources.studio.writer import Studio, agent, tool

EXCLUDE = {"users": ["ana"], "conversations": ["secret-talk", "unknown"], "agents": ["Secretary"]}
SECRET = "swordfish"


def with_attributes(row: dict[str, Any], **attributes: Any) -> dict[str, Any]:
    return row | {"attributes": json.dumps(json.loads(row["attributes"]) | attributes)}


def secret(at: int, **more: Any) -> dict[str, Any]:
    return agent(f"s{at}", f"{SECRET} {at}?", f"{SECRET}!", trace=f"trace-s{at}", **more)


def rows_of_studio() -> list[dict[str, Any]]:
    """One ordinary trace, and six that are private."""
    return [
        agent("open", "What is 1 + 1?", "2", trace="trace-open", conversation="unknown"),  # It names none.
        with_attributes(secret(1), flywheel={"record": False}),
        with_attributes(secret(2), flywheel={"record": "no"}),
        with_attributes(secret(3), user={"id": "ana"}),
        secret(4, conversation="secret-talk"),
        secret(5, name="Secretary"),
        # A tool of the trace refuses for all of it.
        secret(6),
        with_attributes(
            tool("t6", "call", "search", SECRET, parent="s6", trace="trace-s6"), flywheel={"record": False}
        ),
    ]


LINES = [
    {"task_id": "l0", "question": "q", "answer": "a"},
    {"task_id": "l1", "question": SECRET, "answer": SECRET, "metadata": {"user_id": "ana"}},
    {"task_id": "l2", "question": SECRET, "answer": SECRET, "metadata": {"agent_name": "Secretary"}},
    {"task_id": "l3", "question": SECRET, "answer": SECRET, "metadata": {"conversation_id": "secret-talk"}},
]


def stored_rows(conn: Connection) -> list[Any]:
    return [row._asdict() for row in conn.execute(select(replies).order_by(replies.c.id))]


def contents(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in folder.rglob("*") if each.is_file())


async def ingest(config: Config) -> None:
    assert [report.error for report in await state.ingest(config) if report.error] == []


async def test_the_state_has_a_count_of_private_replies_and_nothing_else(tmp_path: Path) -> None:
    Studio(tmp_path / "studio.sqlite").write(*rows_of_studio())
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    sources = [{"path": str(tmp_path / "studio.sqlite")}, {"type": "jsonl", "path": str(tmp_path / "tasks.jsonl")}]
    config = load(write_config(tmp_path, sources=sources, privacy={"exclude": EXCLUDE}))
    for _ in range(2):
        await ingest(config)
        async with open_state(config.state_dir) as store:
            rows = await store.read(stored_rows)
            counts = await store.read(ledger.counts_by_source)
            found = await store.read(lambda conn: conn.execute(select(tasks.c.key)).scalars().all())
        assert {(each.replies, each.tasks, each.skipped["private"]) for each in counts.values()} == {
            (7, 1, 6), (4, 1, 3),
        }  # fmt: skip
        assert len(found) == 2
        private = [row for row in rows if row["skip_reason"] == "private"]
        assert {(row["agent"], row["conversation_id"], row["detail"], row["task_id"]) for row in private} == {
            ("", "", "", None)
        }
        audit = await deep_audited(config)
        assert audit.problems == []
        assert [(each.in_ledger, each.changed) for each in audit.sources] == [(7, []), (4, [])]
    held = contents(config.state_dir)
    for name in (SECRET, "Secretary", "secret-talk", 'ana"'):
        assert name.encode() not in held


@pytest.mark.parametrize("by", ["agent", "attribute"])
async def test_recorded_calls_that_a_private_trace_names_are_erased_everywhere(tmp_path: Path, by: str) -> None:
    kept, gone = mark_of(), mark_of()
    rows = trace(7, gone, ago=60.0)
    if by == "attribute":
        rows[-1] = with_attributes(rows[-1], flywheel={"record": False})
    else:
        rows[-1] = rows[-1] | {"attributes": rows[-1]["attributes"].replace("Solver", "Secretary")}
    Studio(tmp_path / "studio.sqlite").write(*trace(1, kept, ago=60.0), *rows)
    with LogServer(tmp_path / "a.db") as server, LogServer(tmp_path / "b.db") as away:
        server.log.append([call(1, kept), call(7, gone)])
        config = config_of(tmp_path, server, away, privacy={"exclude": EXCLUDE})
        away.stop()
        await ingest(config)
        with CallLogCopy(call_log_copy_path(config.state_dir)) as copy:
            assert [each.request_id for each in stored(copy)] == [kept]
            assert copy.pending()[away.url] == 1
            await ingest(config)
            assert [each.request_id for each in stored(server.log)] == [kept]
            away.start()
            await ingest(config)
            assert copy.pending() == {}
        async with open_state(config.state_dir) as store:
            joined = await store.read(lambda conn: conn.execute(select(reply_calls.c.request_id)).scalars().all())
        assert joined == [kept]
    assert asked(7)[1]["content"].encode() not in contents(config.state_dir)


async def test_calls_of_excluded_users_are_erased_if_a_server_recorded_them(tmp_path: Path) -> None:
    Studio(tmp_path / "studio.sqlite").write(*trace(1, mark_of(), ago=60.0))
    with LogServer(tmp_path / "a.db") as server:
        server.log.append([
            call(1, "fw-1"), replace(call(2, "fw-2"), user="ana"),
            replace(call(3, "fw-3"), conversation="secret-talk"),
        ])  # fmt: skip
        config = config_of(tmp_path, server, privacy={"exclude": EXCLUDE})
        await ingest(config)
        for log in (server.log, CallLogCopy(call_log_copy_path(config.state_dir))):
            with log:
                assert [each.request_id for each in stored(log)] == ["fw-1"]


@pytest.mark.parametrize("kind", ["users", "conversations", "agents"])
def test_an_empty_name_is_an_error(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"privacy\.exclude\.{kind}\.0"):
        load(write_config(tmp_path, privacy={"exclude": {kind: [""]}}))


async def test_recorded_calls_that_a_private_trace_names_over_otlp_are_erased(tmp_path: Path) -> None:
    marks = [mark_of() for _ in range(4)]
    chats = [span(at, {"gen_ai.response.id": f"chatcmpl-{mark}"}, parent=9) for at, mark in enumerate(marks[:3], 1)]
    other = span(8, {"gen_ai.response.id": f"chatcmpl-{marks[3]}"}, trace=2)
    with LogServer(tmp_path / "a.db") as server:
        server.log.append(call(at, mark) for at, mark in enumerate(marks))
        source = {"type": "otlp", "listen": "127.0.0.1:4318"}
        config = config_of(tmp_path, server, sources=[source], privacy={"exclude": EXCLUDE})
        box = Inbox(inbox_path(config.state_dir, source["listen"]))
        # A span before the one that refuses, one with it, and one after it.
        refusing = span(9, {"flywheel.record": False})
        for some in ([chats[0], other], [chats[1], refusing], [chats[2]]):
            rows = rows_of(request(*some))
            await box.store(rows.accepted, rows.private)
        await box.close()
        for _ in range(2):
            await ingest(config)
            assert [each.request_id for each in stored(server.log)] == marks[3:]
            with CallLogCopy(call_log_copy_path(config.state_dir)) as copy:
                assert [each.request_id for each in stored(copy)] == marks[3:]
                assert copy.pending() == {}
