"""A round's directory in two places."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.system.files import write_atomic
from flywheel.training.data.mirrored_folder import Change, MirroredFolder

NAMES = ("rollouts.jsonl", "metrics.jsonl", "progress.json", "stages/1-grpo/trained.json", "stages/2-sft/lines.jsonl")
ACTIONS = st.tuples(
    st.sampled_from(("append", "replace", "shorten", "remove", "exchange", "other")),
    st.sampled_from(NAMES),
    st.binary(max_size=600),
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def act(folder: Path, action: str, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if action == "append":
        with path.open("ab") as file:
            file.write(data)
    elif action == "replace":
        write_atomic(path, data)
    elif action == "shorten" and path.exists():
        os.truncate(path, min(len(data), path.stat().st_size))
    elif action == "remove":
        path.unlink(missing_ok=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(ACTIONS, max_size=25))
def test_both_places_have_the_same_after_each_exchange(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, str, bytes]]
) -> None:
    """Whoever writes: first one side, then the other, and so on."""
    sides = [tmp_path_factory.mktemp("side") for _ in range(2)]
    mirrors = [MirroredFolder(side) for side in sides]
    writes = 0

    def exchange() -> None:
        mirrors[1 - writes].apply(mirrors[writes].changes())
        assert contents(sides[0]) == contents(sides[1])
        assert mirrors[1 - writes].changes() == [], "nothing goes back"

    for action, name, data in actions:
        if action in ("exchange", "other"):
            exchange()
            writes = 1 - writes if action == "other" else writes
        else:
            act(sides[writes], action, name, data)
    exchange()


def test_of_a_file_of_lines_only_the_new_ones_are_sent(tmp_path: Path) -> None:
    path, mirror = tmp_path / "rollouts.jsonl", MirroredFolder(tmp_path)
    path.write_bytes(b"first\n" * 1000)
    assert [len(each.data or b"") for each in mirror.changes()] == [6000]
    with path.open("ab") as file:
        file.write(b"last\n")
    assert mirror.changes() == [Change("rollouts.jsonl", 6000, b"last\n")]
    # Shortened and then longer than before: not what was there with more behind it.
    os.truncate(path, 600)
    with path.open("ab") as file:
        file.write(b"other\n" * 2000)
    assert mirror.changes() == [Change("rollouts.jsonl", 0, b"first\n" * 100 + b"other\n" * 2000)]


def test_what_is_not_of_the_round_stays(tmp_path: Path) -> None:
    for name in ("worker.log", ".hidden", "sync/step-1/weights", "spec.json", "inner/worker.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = MirroredFolder(tmp_path, {"worker.log", "sync"}).changes()
    assert {each.path for each in found} == {"spec.json", "inner/worker.log"}


def test_what_arrives_is_private(tmp_path: Path) -> None:
    MirroredFolder(tmp_path / "there").apply([Change("stages/usage.jsonl", 0, b"{}\n")])
    assert (tmp_path / "there" / "stages" / "usage.jsonl").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o700


def test_a_new_file_arrives_after_what_was_written_before_it(tmp_path: Path) -> None:
    """Each number is written to a file of its own, then to the lines, and then to a name."""
    ours, theirs = tmp_path / "a", tmp_path / "b"
    for each in (ours, theirs):
        each.mkdir()
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            (ours / str(number % 5)).mkdir(exist_ok=True)
            write_atomic(ours / f"data-{number}", b"x" * 2000)
            with (ours / "lines.jsonl").open("a") as file:
                file.write(f"{number}\n")
            write_atomic(ours / str(number % 5) / f"whole-{number}", b"")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        sender, receiver = MirroredFolder(ours), MirroredFolder(theirs)
        while len(list(theirs.glob("*/whole-*"))) < 100:
            for change in sender.changes():
                receiver.apply([change])
                _, is_whole, number = change.path.partition("/whole-")
                # Also if a worker dies now.
                assert not is_whole or number in (theirs / "lines.jsonl").read_text().split()
            for path in theirs.glob("*/whole-*"):
                assert (theirs / path.name.replace("whole", "data")).exists()
    finally:
        ended.set()
        thread.join()
    receiver.apply(sender.changes())
    assert contents(ours) == contents(theirs)


def test_files_that_are_made_while_it_looks_arrive_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is listed, then both files are made, then the folder below is listed."""
    (tmp_path / "below").mkdir()
    walk = os.walk

    def slow(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for place in walk(folder):
            yield place
            for name in ("data", "below/whole"):
                (tmp_path / name).touch()

    monkeypatch.setattr(os, "walk", slow)
    assert [each.path for each in MirroredFolder(tmp_path).changes()] == ["data", "below/whole"]
