"""Task files on their way into the ledger: each task once, and the books balanced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from flywheel.config import Config, parse
from flywheel.daemon.ingestion import Ingestion
from flywheel.daemon.intake import SourceReport
from flywheel.store import audit
from flywheel.store.database import Store
from flywheel.store.schema import tasks
from tests.lines.reading import line
from tests.samples import reply


def config(tmp_path: Path, path: Path) -> Config:
    return parse({"sources": [{"type": "jsonl", "path": str(path)}], "state": {"dir": "state"}}, "test", tmp_path)


async def ingest(tmp_path: Path, path: Path, *, passes: int = 1) -> list[SourceReport]:
    """Some passes of one process; the last one's reports."""
    settings = config(tmp_path, path)
    store = await Store.open(settings.state_dir)
    ingestion = Ingestion(store, settings)
    try:
        for _ in range(passes):
            reports = await ingestion.run(final=True)
        assert (await store.read(audit.balance)).balanced
    finally:
        await ingestion.close()
        await store.close()
    return reports


def exported(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (tmp_path / "state" / "tasks.jsonl").read_bytes().splitlines()]


async def test_agentjet_tasks_without_ids_stay_apart_and_come_once(tmp_path: Path) -> None:
    path = tmp_path / "agentjet.jsonl"
    told = [
        {
            "task_id": "no_id",
            "main_query": f"q{n}",
            "init_messages": [],
            "env_type": "no_env",
            "metadata": {"answer": "a"},
        }
        for n in range(700)
    ]
    path.write_text("".join(json.dumps(task) + "\n" for task in [*told, *told[:50], {"main_query": "no answer"}]))
    [report] = await ingest(tmp_path, path, passes=2)
    assert (report.schema, report.error) == ("jsonl", None)
    assert (report.counts.tasks, dict(report.counts.skipped), report.counts.dead) == (700, {"no_answer": 1}, 0)
    [report] = await ingest(tmp_path, path)
    assert (report.new, report.counts.replies) == (0, 701)
    assert {task["main_query"] for task in exported(tmp_path)} == {task["main_query"] for task in told}
    assert len(exported(tmp_path)) == 700


async def test_files_of_a_directory_come_and_go(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    assert await ingest(tmp_path, folder) == []
    (folder / "b.jsonl").write_bytes(line(1) + b"nonsense\n")
    (folder / "a.jsonl").write_bytes(line(2) + line(1))
    reports = await ingest(tmp_path, folder)
    assert [report.path.name for report in reports] == ["a.jsonl", "b.jsonl"]
    assert [(report.counts.replies, report.counts.dead) for report in reports] == [(2, 0), (2, 1)]
    # The same task in two files is one.
    assert len(exported(tmp_path)) == 2
    (folder / "a.jsonl").rename(folder / "c.jsonl")
    (folder / "b.jsonl").unlink()
    assert [report.path.name for report in await ingest(tmp_path, folder)] == ["c.jsonl"]
    assert len(exported(tmp_path)) == 2


async def test_a_file_whose_name_is_no_text_costs_itself(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "good.jsonl").write_bytes(line(1))
    misnamed = Path(os.fsdecode(os.fsencode(folder) + b"/\xff.jsonl"))
    misnamed.write_bytes(line(2))
    good, bad = await ingest(tmp_path, folder)
    assert (good.path.name, good.counts.tasks, good.error) == ("good.jsonl", 1, None)
    assert "not UTF-8: b'\\xff.jsonl'. Rename it" in str(bad.error)
    misnamed.rename(folder / "renamed.jsonl")
    assert [report.new for report in await ingest(tmp_path, folder)] == [0, 1]


async def test_what_was_exported_is_read_back_into_another_state(tmp_path: Path) -> None:
    from flywheel.batch import entry_of

    first = tmp_path / "exported.jsonl"
    first.write_bytes(b"".join(entry_of(reply(number), "/a.sqlite").line + b"\n" for number in range(20)))
    [report] = await ingest(tmp_path, first)
    assert report.new == 20
    before = {task["task_id"]: task for task in map(json.loads, first.read_text().splitlines())}
    for task in exported(tmp_path):
        told = before[task["task_id"]]
        assert task["init_messages"] == told["init_messages"]
        assert task["metadata"]["conversation_id"] == told["metadata"]["conversation_id"]
        assert task["metadata"]["started_at"] == told["metadata"]["started_at"]


async def test_a_missing_file_is_an_error_of_its_source(tmp_path: Path) -> None:
    [report] = await ingest(tmp_path, tmp_path / "nowhere.jsonl")
    assert "No such file" in str(report.error)
    (tmp_path / "nowhere.jsonl").write_bytes(line(1))
    [report] = await ingest(tmp_path, tmp_path / "nowhere.jsonl")
    assert (report.error, report.new) == (None, 1)


@pytest.mark.parametrize("conversation", [None, "", "unknown"])
async def test_answers_to_one_question_are_on_one_side(tmp_path: Path, conversation: str | None) -> None:
    path = tmp_path / "tasks.jsonl"
    metadata = {} if conversation is None else {"conversation_id": conversation}
    rows = [{"question": f"q{n}", "answer": answer, "metadata": metadata} for n in range(30) for answer in "ab"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    await ingest(tmp_path, path)
    store = await Store.view(tmp_path / "state")
    found = await store.read(lambda conn: conn.execute(select(tasks.c.payload, tasks.c.split)).all())
    await store.close()
    sides: dict[str, set[str]] = {}
    for payload, split in found:
        sides.setdefault(payload["question"], set()).add(split)
    assert len(found) == 60
    assert all(len(side) == 1 for side in sides.values())
    assert len(set.union(*sides.values())) == 2
