"""Documents become passages: nothing of a text is lost, none is too long, and what is no text is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.sources.documents import ENOUGH, LARGEST, LONGEST, cut, passages_of

BLOCKS = st.lists(
    st.sampled_from(
        ["# Title", "## Part\n", "word " * 200, "x" * (LONGEST + 7), "\n\n", " \t\n", "\r\n", "#", "é", "\u2028"]
    )
    | st.text(max_size=30),
    max_size=30,
)


def bare(text: str) -> str:
    return "".join(text.split())


@given(BLOCKS)
def test_nothing_but_white_space_is_lost_and_no_passage_is_too_long(blocks: list[str]) -> None:
    text = "\n".join(blocks)
    passages = list(cut(text))
    assert bare("".join(passages)) == bare(text)
    assert all(len(each) <= LONGEST for each in passages)


def test_a_heading_begins_a_passage_once_there_is_enough() -> None:
    short, long = "few words", "word " * (ENOUGH // 5)
    passages = list(cut(f"# A\n{short}\n## B\n{long}\n## C\n{short}\n\n{short}"))
    assert [each.splitlines()[0] for each in passages] == ["# A", "## C"]
    assert passages[0].splitlines()[3] == "## B"


def test_paragraphs_are_kept_whole_where_they_can_be() -> None:
    paragraphs = [f"{n} " + "word " * 400 for n in range(9)]
    passages = list(cut("\n\n".join(paragraphs)))
    assert len(passages) == 5
    assert all(each[0].isdigit() and each.endswith("word") for each in passages)


def test_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.md", "a/z.txt", "a/UPPER.MD", ".hidden.md", ".git/x.md", "picture.png", "a/.venv/y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "c.md").write_bytes("\ufeffWörter\r\nund Zeilen".encode())
    (tmp_path / "copy.txt").write_text("text of b.md")
    passages, left_out = passages_of(tmp_path)
    assert [tuple(each) for each in passages] == [
        ("a/UPPER.MD", "text of a/UPPER.MD"),
        ("a/z.txt", "text of a/z.txt"),
        ("b.md", "text of b.md"),
        ("c.md", "Wörter\nund Zeilen"),
    ]
    assert left_out == {}


def test_what_is_no_text_of_the_directory_is_left_out_with_the_reason(tmp_path: Path) -> None:
    docs, outside = tmp_path / "docs", tmp_path / "outside"
    docs.mkdir()
    outside.mkdir()
    (outside / "secret.md").write_text("a secret")
    (docs / "good.md").write_text("good")
    (docs / "latin.txt").write_bytes("Größe".encode("latin-1"))
    (docs / "utf-16.txt").write_bytes("text".encode("utf-16"))
    (docs / "utf-16-le.txt").write_bytes("text".encode("utf-16-le"))
    (docs / "empty.md").touch()
    (docs / "blank.md").write_text("\ufeff \n")
    (docs / "huge.txt").write_text("x" * (LARGEST + 1))
    (docs / "link.md").symlink_to(outside / "secret.md")
    (docs / "inside.md").symlink_to(docs / "good.md")
    (docs / "broken.md").symlink_to(docs / "nothing.md")
    (docs / "loop.md").symlink_to(docs / "loop.md")
    (docs / "folder").symlink_to(outside)
    os.mkfifo(docs / "pipe.txt")
    (docs / "named.md").mkdir()
    (docs / os.fsdecode(b"caf\xe9.md")).touch()
    passages, left_out = passages_of(docs)
    assert [each.document for each in passages] == ["good.md"]
    no_file = "it is no regular file"
    assert left_out == {
        "latin.txt": "it is not UTF-8: invalid start byte at byte 2",
        "utf-16.txt": "it is not UTF-8: invalid start byte at byte 0",
        "utf-16-le.txt": "it has NUL characters, as text in UTF-16 has",
        "empty.md": "it is empty",
        "blank.md": "it is empty",
        "huge.txt": "it is larger than 4 MiB",
        "link.md": "it is a link to a file outside of the directory",
        "broken.md": no_file,
        "loop.md": no_file,
        "pipe.txt": no_file,
        "caf?.md": "it is empty",
    }


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "closed.md").touch(mode=0)
    try:
        assert passages_of(tmp_path)[1] == {"closed": "Permission denied", "closed.md": "Permission denied"}
    finally:
        (tmp_path / "closed").chmod(0o700)


def test_the_directory_may_be_hidden_or_a_link(tmp_path: Path) -> None:
    (tmp_path / ".docs").mkdir()
    (tmp_path / ".docs" / "a.md").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / ".docs")
    for name in (".docs", "link"):
        assert [each.document for each in passages_of(tmp_path / name)[0]] == ["a.md"]
