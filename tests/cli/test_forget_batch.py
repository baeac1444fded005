"""`flywheel forget` of a user whose requests wait for their responses, and of one whose replies are tasks."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run
from tests.factories.batches import request, response
from tests.factories.config import write_config
from tests.factories.planted import planted_in
from tests.factories.trace import write_lines


def test_what_waits_and_what_was_joined_is_erased_and_does_not_come_back(flywheel: Run, tmp_path: Path) -> None:
    folder = tmp_path / "batch"
    folder.mkdir()
    config = str(write_config(tmp_path, sources=[{"type": "jsonl", "path": "batch"}], state={"dir": "state"}))
    lines = [request(number, f"plum {number}?", user=f"user-{number % 2}") for number in range(4)]
    write_lines(folder / "in.jsonl", *lines)
    write_lines(folder / "out-1.jsonl", response(0, "pear 0"), response(1, "pear 1"))
    unreadable = request(5, "plum 5?", user="user-1")
    write_lines(folder / "others.jsonl", {"question": "Who?", "answer": "Goethe"}, unreadable)
    assert flywheel("ingest", "-c", config).code == 0
    assert "plum 5" in planted_in(tmp_path / "state", ["plum 5"])
    assert flywheel("forget", "--user", "user-1", "-c", config).code == 0
    write_lines(folder / "out-2.jsonl", response(2, "pear 2"), response(3, "pear 3"))
    report = next(
        each for each in flywheel("ingest", "-c", config, "--json").json["sources"] if each["path"] == str(folder)
    )
    assert (report["tasks"], report["pending"]) == (2, 0)
    words = ["plum 0", "plum 2", "pear 2", "plum 1", "plum 3", "pear 1", "pear 3", "plum 5", "user-1"]
    assert set(planted_in(tmp_path / "state", words)) == set(words[:3])
    # Other files of the folder, and the same lines again.
    write_lines(folder / "copy.jsonl", *lines, *(response(number, f"pear {number}") for number in range(4)))
    report = next(
        each for each in flywheel("ingest", "-c", config, "--json").json["sources"] if each["path"] == str(folder)
    )
    assert (report["tasks"], report["pending"]) == (2, 0)
    assert set(planted_in(tmp_path / "state", words)) == set(words[:3])
    audit = flywheel("audit", "--deep", "--json", "-c", config)
    assert audit.code == 0, audit.out
