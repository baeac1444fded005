"""A state for the pages: of a real run of `make demo-agent`, with what that run lacked.

`recorded_state.tar.xz` is the run: 802 tasks of an agent with a tool, judged, two rounds that were promoted with all
their files, and a planned one. `put_what_lacks` adds hostile, undecided and held tasks, and dead letters.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import tarfile
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace
from sqlalchemy import Connection, func, select, update

from flywheel.config.file import Config, parse
from flywheel.records.round import RoundResult
from flywheel.records.states import Split, TaskState
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.serving.client.adapter_swap import ReplicaReport
from flywheel.serving.client.weight_verification import ProbeFigures
from flywheel.store import dead_letters, judge_usage, ledger
from flywheel.store.kernel import schema
from flywheel.store.kernel.transitions import move
from flywheel.store.verdicts import point
from tests.factories.state import in_thread, open_state, write_state
from tests.factories.task import task_keys
from tests.factories.trace import batch, put_replies, record, replies_on, reply
from tests.factories.verdict import settle, undecided

T = TypeVar("T")

DATA = Path(__file__).parent.parent / "data"
ALIAS = "demo-agent"
HOSTILE = (
    "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"
    "![remote](http://192.0.2.1/pixel.png) [link](javascript:alert(1)) \u202etxet desrever\u202c \u200bhidden\x1b[31m"
    " </textarea></title></svg>{{ 7 * 7 }}{% raw %}"
)
"""Markup, remote images, scripts, bidirectional and control characters, and template syntax."""
ASKED_AT = datetime(2026, 11, 22, 21, 30, tzinfo=UTC)
"""Towards the end of the run."""


def config_of(folder: Path, **settings: Any) -> Config:
    """The configuration of the state in `folder`."""
    return parse({"state": {"dir": str(folder / "state")}, "model": {"alias": ALIAS}, **settings}, "test", folder)


def unpack(folder: Path, *, complete: bool = True) -> Config:
    """Make the state in `folder`; its configuration. Without `complete`, it is the recorded run alone."""
    with tarfile.open(DATA / "recorded_state.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    config = config_of(folder)
    in_thread(_adapt(config, complete=complete))
    return config


def copied(config: Config, folder: Path) -> Config:
    """The same state in `folder`, in a third of the time that unpacking takes."""
    copy = config_of(folder)
    shutil.copytree(config.state_dir, copy.state_dir)
    write_state(copy.state_dir, _move_rounds, config.state_dir / "rounds", copy.state_dir / "rounds")
    return copy


async def _adapt(config: Config, *, complete: bool) -> None:
    recorded = (config.state_dir / "state.db").rename(config.state_dir / "recorded.db")
    async with open_state(config.state_dir) as store:
        await store.write(_copy_rows, recorded)
        recorded.unlink()
        await store.write(_move_rounds, "/recorded/state/rounds", config.state_dir / "rounds")
        if complete:
            await store.write(put_what_lacks)


def _copy_rows(conn: Connection, recorded: Path) -> None:
    """Fill the tables, whose schema may have changed since, with the rows of the recorded database."""
    with contextlib.closing(sqlite3.connect(recorded)) as source:
        for table in schema.metadata.sorted_tables:
            there = {name for _, name, *_ in source.execute(f"PRAGMA table_info({table.name})")}
            names = [f'"{column.name}"' for column in table.columns if column.name in there]
            if names:
                rows = source.execute(f"SELECT {', '.join(names)} FROM {table.name}").fetchall()
                insertion = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
                if rows:
                    conn.exec_driver_sql(insertion, rows)
        decided = source.execute("SELECT decided_at, decision, round_id FROM gate_decisions").fetchall()
        for values in decided:
            conn.exec_driver_sql("UPDATE gate_tests SET decided_at = ?, decision = ? WHERE round_id = ?", values)
    # What the recorded database says by its verdicts and results alone, and what these did not say yet.
    point(conn, list(conn.execute(select(schema.tasks.c.id)).scalars()))
    results, samples = schema.rounds.c.result, schema.round_samples.c
    for number, found in conn.execute(select(schema.rounds.c.id, results).where(results.is_not(None))).all():
        result = RoundResult.model_validate({**found, "probe": None}).model_dump(mode="json")
        conn.execute(update(schema.rounds).where(schema.rounds.c.id == number).values(result=result))
        for name in ("left_out", "without_gradient"):
            of_keys = schema.tasks.c.key.in_(list(result[name]))
            own = samples.round_id == number, samples.task_id.in_(select(schema.tasks.c.id).where(of_keys))
            conn.execute(update(schema.round_samples).where(*own).values({name: True}))
    for number, report in conn.execute(select(schema.deployments.c.id, schema.deployments.c.report)).all():
        for replica in (report or {}).get("replicas", ()):
            replica |= {**asdict(ReplicaReport("")), **replica}
            if replica["probe"]:
                replica["probe"] = {**dict.fromkeys(each.name for each in fields(ProbeFigures)), **replica["probe"]}
        conn.execute(update(schema.deployments).where(schema.deployments.c.id == number).values(report=report))


def _move_rounds(conn: Connection, old: str | Path, directory: Path) -> None:
    for table, column in ((schema.rounds, schema.rounds.c.dir), (schema.adapters, schema.adapters.c.path)):
        moved = func.replace(column, str(old), str(directory))
        conn.execute(update(table).values({column.name: moved}))


def injections() -> list[str]:
    """The texts by which replies try to sway a judge."""
    return [json.loads(line)["text"] for line in (DATA / "injections.jsonl").read_text().splitlines()]


def put_what_lacks(conn: Connection) -> None:
    """Hostile texts wherever a page shows any, an undecided and a held task, open and closed dead letters."""
    source = ledger.source_id(conn, f"/traces/{HOSTILE[:40]}.sqlite")
    call = {"id": "c1", "type": "function", "function": {"name": f"add{HOSTILE}", "arguments": HOSTILE}}
    steps = (
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": f"add{HOSTILE}", "content": HOSTILE},
    )
    hostile = [
        reply(9000, agent=f"Eve {HOSTILE}", query=HOSTILE, answer=HOSTILE, trajectory=steps),
        reply(9001, query="A reply about which the judge could not decide", answer="Perhaps."),
        reply(9002, query="A question that was asked often", answer="An answer"),
        *(reply(9100 + number, query=f"Injection {number}", answer=text) for number, text in enumerate(injections())),
    ]
    hostile = [replace(each, started_at=ASKED_AT, ended_at=ASKED_AT) for each in hostile]
    record(conn, source, batch(*hostile), train_ratio=0.7, split_seed=42)
    numbers = list(
        conn.execute(
            select(schema.tasks.c.id)
            .where(schema.tasks.c.state == TaskState.PENDING.value)
            .order_by(schema.tasks.c.id)
        ).scalars()
    )
    results = (
        CriterionResult("correct", "no", 0.0, False, HOSTILE),
        CriterionResult(f"tone {HOSTILE}", HOSTILE, 0.4, False, HOSTILE),
    )
    verdicts = [Verdict(Outcome.REJECTED, 0.31, results, HOSTILE, calls=1), undecided(), None]
    verdicts += [Verdict(Outcome.REJECTED, 0.1, results[:1], "it is wrong", calls=1)] * (len(numbers) - 3)
    for number, verdict in zip(numbers, verdicts, strict=True):
        if verdict is None:
            move(conn, number, TaskState.PENDING, TaskState.HELD, "a burst of similar questions")
            continue
        move(conn, number, TaskState.PENDING, TaskState.JUDGING)
        settle(conn, number, verdict, "a-rubric", "a-judge", 60.0)
    for number in range(3):
        dead_letters.dead_letter(conn, dead_letters.ROW, f"span-{number}", f"no JSON {HOSTILE}", HOSTILE, source)
    dead_letters.drop(conn, [1])
    judge_usage.add_error(conn, HOSTILE)


def put_held_out(conn: Connection) -> list[str]:
    """Held-out tasks; the keys."""
    replies = replies_on(Split.HELD_OUT, 8, query=f"What is it? {HOSTILE}")
    put_replies(conn, *replies)
    return task_keys(conn)
