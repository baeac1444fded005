"""A task file of an earlier format makes room for one of the present format, and no task is lost or written twice."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Connection, select

from flywheel.cli.audit.task_file_audit import compare_task_file
from flywheel.store import ledger, task_file
from flywheel.store.existing_task_files import earlier_files
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks
from flywheel.store.task_file import TaskFile
from tests.samples import batch, reply

NEW_KEYS = (
    "prompt_tokens",
    "adapter_source",
    "prompt_exact",
    "prompt_reason",
    "prompt_source",
    "parameters_json",
    "extra_json",
)


def put(conn: Connection, first: int, count: int) -> None:
    told = batch(*(reply(number) for number in range(first, first + count)))
    ledger.record_batch(conn, ledger.source_id(conn, "/a"), told, train_ratio=0.7, split_seed=42)


def keys(conn: Connection) -> list[str]:
    return list(conn.execute(select(tasks.c.key).order_by(tasks.c.id)).scalars())


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def written(*paths: Path) -> list[str]:
    return [line["task_id"] for path in paths for line in lines(path)]


def made_old(path: Path) -> None:
    """As an earlier Flywheel wrote the same tasks."""
    old = lines(path)
    for line in old:
        for key in NEW_KEYS:
            line["metadata"].pop(key, None)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in old))


async def begun(store: Store, path: Path, count: int) -> None:
    await store.write(put, 0, count)
    await TaskFile(path).follow(store)
    made_old(path)


async def test_a_file_of_an_earlier_format_is_set_aside_under_the_next_free_number(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    await begun(store, path, 3)
    (tmp_path / "tasks-1.jsonl").write_text("somebody's own\n")
    before = path.read_bytes()
    await store.write(put, 3, 2)
    assert await TaskFile(path).follow(store) == 2
    aside = tmp_path / "tasks-2.jsonl"
    assert aside.read_bytes() == before
    assert earlier_files(path) == [aside]
    assert written(aside, path) == await store.read(keys)
    for line in lines(path):
        about = line["metadata"]
        assert [type(about[key]) for key in NEW_KEYS] == [int, str, bool, str, str, str, str]
        assert (about["prompt_exact"], about["prompt_reason"], about["prompt_source"]) == (True, "", "trace")
    await store.write(put, 5, 1)
    assert await TaskFile(path).follow(store) == 1
    assert earlier_files(path) == [aside]


async def test_a_file_of_the_present_format_stays(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    for count in (2, 3):
        await store.write(put, count, count)
        await TaskFile(path).follow(store)
    assert earlier_files(path) == []
    assert written(path) == await store.read(keys)


DYING = """
import asyncio, os, signal, sys
from pathlib import Path
from flywheel.store import task_file
from flywheel.store.kernel.database import Store

place, path, state = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
calls = {"renaming": (Path, "rename"), "appending": (task_file, "append_lines"), "marking": (task_file, "_mark")}
of, name = calls[place]
setattr(of, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))

async def main():
    store = await Store.open(state)
    await task_file.TaskFile(path).follow(store)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("place", ["renaming", "appending", "marking"])
async def test_a_process_that_is_killed_loses_and_doubles_nothing(tmp_path: Path, place: str, torn: bool) -> None:
    """Before the rename, between it and the first append, and before that is marked."""
    path, state = tmp_path / "tasks.jsonl", tmp_path / "state"
    store = await Store.open(state)
    await begun(store, path, 3)
    # Two that the earlier version had appended, and not marked when it died; of the last only a part.
    await store.write(put, 3, 4)
    appended = [line + b"\n" for line in await store.read(_payloads)][3:5]
    with path.open("ab") as file:
        file.writelines([appended[0], appended[1][:50] if torn else appended[1]])
    made_old_but_torn(path)
    await store.close()
    process = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", DYING, place, path, state], capture_output=True, timeout=120
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    store = await Store.open(state)
    try:
        await TaskFile(path).follow(store)
        assert written(*earlier_files(path), path) == await store.read(keys)
        assert len(earlier_files(path)) == 1
        found = await compare_task_file(store, path)
        assert (found.problems, found.lines, found.exported, found.moved_away) == ([], 7, 7, 0)
    finally:
        await store.close()


def _payloads(conn: Connection) -> list[bytes]:
    return [orjson.dumps(line) for line in conn.execute(select(tasks.c.payload).order_by(tasks.c.id)).scalars()]


def made_old_but_torn(path: Path) -> None:
    whole, end, torn = path.read_bytes().rpartition(b"\n")
    path.write_bytes(whole + end)
    made_old(path)
    with path.open("ab") as file:
        file.write(torn)


async def test_the_users_own_file_is_set_aside_too(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    await store.write(put, 0, 3)
    source = await store.read(ledger.source_id, "/a")
    await task_file.export_sources(store, path, [source])
    made_old(path)
    await store.write(put, 3, 2)
    assert await task_file.export_sources(store, path, [source]) == 2
    assert await task_file.export_sources(store, path, [source]) == 0
    assert written(tmp_path / "mine-1.jsonl", path) == await store.read(keys)


async def test_the_audit_reads_both_files(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    await begun(store, path, 3)
    await store.write(put, 3, 2)
    await TaskFile(path).follow(store)
    aside = tmp_path / "tasks-1.jsonl"
    found = await compare_task_file(store, path)
    assert (found.problems, found.lines, found.exported, found.moved_away) == ([], 5, 5, 0)
    assert found.as_json()["set_aside"] == [str(aside)]
    whole = aside.read_bytes()
    first, second, third = whole.splitlines(keepends=True)
    aside.write_bytes(first + third)
    found = await compare_task_file(store, path)
    assert found.lost == [orjson.loads(second)["task_id"]]
    aside.write_bytes(first + b"torn\n" + second + third)
    (problem,) = (await compare_task_file(store, path)).problems
    assert f"1 line of {aside} torn or no task: line 2" in problem
    aside.write_bytes(whole + lines_of(path)[0])
    assert len((await compare_task_file(store, path)).twice) == 1
    aside.write_bytes(whole)
    path.unlink()
    found = await compare_task_file(store, path)
    assert (found.lines, found.problems, found.moved_away) == (3, [], 2)
    await store.write(put, 5, 2)
    await TaskFile(path).follow(store)
    found = await compare_task_file(store, path)
    assert (found.lines, found.problems, found.moved_away) == (5, [], 2)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)
