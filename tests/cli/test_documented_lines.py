"""The lines of JSON that the pages show are read as the pages say."""

from __future__ import annotations

import json
import re
from pathlib import Path

from flywheel.judge.labels import read_labels
from tests.cli.conftest import Run

DOCS = Path(__file__).parents[2] / "docs"


def lines(page: str, after: str) -> str:
    """The block of lines that follows these words on a page."""
    rest = (DOCS / page).read_text().split(after)[1]
    block = re.search(r"(?:^ {4}\{.*\n)+", rest, re.MULTILINE)
    return re.sub(r"^ {4}", "", block[0], flags=re.MULTILINE)


def test_the_lines_of_task_files_are_all_the_same_task(flywheel: Run, tmp_path: Path) -> None:
    written = lines("connect/files.md", "All of these are the same task:")
    (tmp_path / "tasks.jsonl").write_text(written)
    source = {"type": "jsonl", "path": str(tmp_path / "tasks.jsonl")}
    (tmp_path / "flywheel.yaml").write_text(json.dumps({"state": {"dir": "home"}, "sources": [source]}))
    assert flywheel("ingest", "--json").json["tasks"] == 1
    [task] = flywheel("tasks", "--state", "pending", "--json").json["tasks"]
    assert (task["query"], task["answer"]) == ("What is 1 plus 1?", "2")
    assert len(written.splitlines()) == 5
    # No agent is named on any of them.
    assert f"({tmp_path / 'tasks.jsonl'})" in flywheel("why", task["task_id"]).out


def test_the_lines_of_labels_are_labels(tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_text(lines("judge/write-a-rubric.md", "are lines with `query` and `answer`:"))
    known = {"query": "Q?", "answer": "A."}
    found = read_labels(file, lambda ids: dict.fromkeys(ids, known))
    assert [label.accept for label in found.labels] == [True, False, True]
