"""Files appear whole, and torn lines are cut."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.system import files
from flywheel.system.files import append_jsonl, cut_torn_line, expanded, json_line, tidied, tree_sha256, write_atomic

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=8
)


@given(json_values)
def test_a_line_is_one_line_of_utf8(value: object) -> None:
    line = json_line(value)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    line.decode("utf-8")
    assert json.loads(line) is not None or value is None


@pytest.mark.parametrize("torn", [b"", b'{"task_id"', b"x" * 200_000])
@pytest.mark.parametrize("whole", [0, 1, 3])
def test_only_the_torn_line_is_cut(tmp_path: Path, whole: int, torn: bytes) -> None:
    path = tmp_path / "t.jsonl"
    append_jsonl(path, [{"n": number} for number in range(whole)])
    with path.open("ab") as file:
        file.write(torn)
    assert cut_torn_line(path) == len(torn)
    assert [json.loads(line)["n"] for line in path.read_bytes().splitlines()] == list(range(whole))
    assert cut_torn_line(path) == 0


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
@given(
    lines=st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=9), torn=st.booleans()
)
def test_the_last_lines_are_those_of_the_whole_file(lines: list[bytes], torn: bool, block: int) -> None:
    ended = [line + b"\n" for line in lines]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_BLOCK", block)
        for count in (0, 1, 3, 20):
            file = io.BytesIO(b"".join(ended) + b"torn" * torn)
            assert list(files.last_lines(file, count)) == (ended[-count:] if count else [])


def test_long_last_lines_are_read_once_each(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(b"%d" % n * 3_000_000 + b"\n" for n in range(9)))
    read = 0

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            nonlocal read
            found = super().readinto(buffer) or 0
            read += found
            return found

    with io.BufferedReader(Counted(path)) as file:
        assert [line[:1] for line in files.last_lines(file, 6)] == [b"3", b"4", b"5", b"6", b"7", b"8"]
    assert read <= 2 * path.stat().st_size


def test_an_atomic_write_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"one")
    write_atomic(tmp_path / "a", b"two")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"two"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"one")
    with pytest.raises(TypeError):
        write_atomic(tmp_path / "a", "text")  # type: ignore[arg-type]
    assert (tmp_path / "a").read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_tree_hash_sees_content_names_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a").write_text("1")
    first = tree_sha256(tmp_path)
    assert tree_sha256(tmp_path) == first
    (tmp_path / "x" / "a").write_text("2")
    assert tree_sha256(tmp_path) != first
    (tmp_path / "x" / "a").write_text("1")
    (tmp_path / "x" / "a").rename(tmp_path / "x" / "b")
    assert tree_sha256(tmp_path) != first


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_file_follows_the_umask_and_a_replaced_one_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for expected in (0o600, 0o640, 0o666):
        if path.exists():
            path.chmod(expected)
        write_atomic(path, b"one")
        assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(target)
    for text in (b"one", b"two"):
        write_atomic(link, text)
        assert link.is_symlink()
        assert target.read_bytes() == text
    assert [path.name for path in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("path", ["~no-such-user-here/x", "a\0b", "x" * 256, "x/" * 2049])
def test_a_path_that_no_file_can_have_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"home directory|NUL|too long"):
        expanded(Path(path))


def test_a_path_is_tidied_where_it_leads_to_the_same_place(tmp_path: Path) -> None:
    elsewhere = tmp_path / "far" / "away"
    elsewhere.mkdir(parents=True)
    (tmp_path / "link").symlink_to(elsewhere)
    assert tidied(tmp_path / "configs" / ".." / "db") == tmp_path / "db"
    assert tidied(tmp_path / "db") == tmp_path / "db"
    behind_a_link = tmp_path / "link" / ".." / "db"
    assert tidied(behind_a_link) == behind_a_link


@pytest.mark.slow
def test_as_many_open_files_as_the_system_allows() -> None:
    script = (
        "import resource; from flywheel.system.process import tune_process; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024)); tune_process(); tune_process(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "(1024, 1024)\n"
