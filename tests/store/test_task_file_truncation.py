"""A task file that another program has cut is told, and not only when somebody audits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flywheel.store import task_file
from flywheel.store.kernel.database import Store
from flywheel.store.task_file import TaskFile
from tests.factories.task import written_keys
from tests.factories.trace import put_numbered

WORDS = "was cut by another program"


async def followed(store: Store, path: Path) -> str:
    """What is known of the file after a process has begun and followed."""
    await TaskFile(path).follow(store)
    return await store.read(task_file.warning)


@pytest.fixture
async def path(store: Store, tmp_path: Path) -> Path:
    await store.write(put_numbered, 0, 20)
    path = tmp_path / "tasks.jsonl"
    assert await followed(store, path) == ""
    return path


def cut(path: Path, how: str) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "in the middle of a line":
        os.truncate(path, len(b"".join(lines[:9])) + 50)
    elif how == "at a line":
        os.truncate(path, len(b"".join(lines[:9])))
    elif how == "whole":
        os.truncate(path, 0)
    else:
        beside = path.with_name("beside")
        beside.write_bytes(b"".join(lines[:5] + lines[6:]))
        beside.replace(path)


@pytest.mark.parametrize(
    "how", ["in the middle of a line", "at a line", "whole", "by an editor that leaves a line out"]
)
async def test_a_cut_file_is_told(store: Store, path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    cut(path, how)
    assert WORDS in await followed(store, path)
    assert WORDS in caplog.text


@pytest.mark.parametrize("how", ["in the middle of a line", "by an editor that leaves a line out"])
async def test_it_is_told_until_it_is_mended_though_lines_are_appended(
    store: Store, path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    whole = path.read_bytes()
    cut(path, how)
    await store.write(put_numbered, 20, 30)
    for _ in range(2):
        caplog.clear()
        assert WORDS in await followed(store, path)
        assert caplog.text.count(WORDS) == 1
    assert len(written_keys(path)) in (9 + 30, 19 + 30)
    path.write_bytes(whole + b"".join(path.read_bytes().splitlines(keepends=True)[-30:]))
    assert await followed(store, path) == ""


async def test_a_daemon_tells_it_when_it_happens_and_once(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TaskFile(tmp_path / "tasks.jsonl")
    await store.write(put_numbered, 0, 20)
    await file.follow(store)
    cut(file.path, "at a line")
    for _ in range(3):
        await file.follow(store)
    await store.write(put_numbered, 20, 5)
    await file.follow(store)
    assert caplog.text.count(WORDS) == 1


@pytest.mark.parametrize("more", [0, 3])
async def test_a_file_that_was_moved_away_is_not_cut(store: Store, path: Path, more: int) -> None:
    path.rename(path.with_name("old.jsonl"))
    assert await followed(store, path) == ""
    await store.write(put_numbered, 20, 3)
    assert await followed(store, path) == ""
    assert len(written_keys(path)) == 3


async def test_the_end_of_the_last_line_alone_is_put_back(store: Store, path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)
    assert await followed(store, path) == ""
    await store.write(put_numbered, 20, 3)
    assert await followed(store, path) == ""
    assert len(written_keys(path)) == 23


async def test_another_path_is_another_file(store: Store, path: Path) -> None:
    cut(path, "at a line")
    assert WORDS in await followed(store, path)
    await store.write(put_numbered, 20, 3)
    assert await followed(store, path.with_name("other.jsonl")) == ""
