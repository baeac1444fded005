"""The task file follows the state: every task once and in order, whatever happened between append and mark."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from sqlalchemy import Connection, func, select

from flywheel.store import export, ledger
from flywheel.store.bulk import CHUNK
from flywheel.store.database import Store
from flywheel.store.export import TaskFile
from flywheel.store.schema import tasks
from tests.samples import batch, reply

MANY = 2 * CHUNK + 7


def put(conn: Connection, first: int, count: int) -> None:
    told = batch(*(reply(number) for number in range(first, first + count)))
    ledger.record_batch(conn, ledger.source_id(conn, "/a"), told, train_ratio=0.7, split_seed=42)


def keys(conn: Connection) -> list[str]:
    return list(conn.execute(select(tasks.c.key).order_by(tasks.c.id)).scalars())


def waiting(conn: Connection) -> int:
    return int(conn.execute(select(func.count()).where(tasks.c.exported.is_(False))).scalar_one())


def written(path: Path) -> list[str]:
    return [orjson.loads(line)["task_id"] for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("count", [1, CHUNK, MANY])
async def test_every_task_is_a_line_once_and_in_order(store: Store, tmp_path: Path, count: int) -> None:
    file = TaskFile(tmp_path / "tasks.jsonl")
    assert await file.follow(store) == 0
    await store.write(put, 0, count)
    assert await file.follow(store) == count
    assert await file.follow(store) == 0
    await store.write(put, count, 3)
    assert await file.follow(store) == 3
    assert written(file.path) == await store.read(keys)
    assert await store.read(waiting) == 0


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("pages", [1, 2])
async def test_what_was_appended_and_not_marked_is_not_appended_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool, pages: int
) -> None:
    await store.write(put, 0, MANY)
    file = TaskFile(tmp_path / "tasks.jsonl")
    mark, left = export._mark, pages

    def die(conn: Connection, rows: list[export._Row]) -> list[export._Row]:
        nonlocal left
        left -= 1
        if not left:
            raise RuntimeError("died")
        return mark(conn, rows)

    monkeypatch.setattr(export, "_mark", die)
    with pytest.raises(RuntimeError):
        await file.follow(store)
    monkeypatch.setattr(export, "_mark", mark)
    assert len(written(file.path)) == pages * CHUNK
    assert await store.read(waiting) == MANY - (pages - 1) * CHUNK
    await (TaskFile(file.path) if anew else file).follow(store)
    assert written(file.path) == await store.read(keys)
    assert await store.read(waiting) == 0
