"""`flywheel label` and `labels`, by hand: what people say, how far the judge agrees, and the file for `calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.app import this_person
from flywheel.judge.labels import read_labels
from flywheel.system.lock import instance_lock
from tests.cli.conftest import Run


@pytest.fixture
def tasks(flywheel: Run, round_due: None, tmp_path: Path) -> list[str]:
    """Ten judged tasks, the oldest first."""
    (tmp_path / "flywheel.yaml").write_text("state: {dir: state}\nsources: []\n")
    return [task["task_id"] for task in reversed(flywheel("tasks", "--json").json["tasks"])]


@pytest.mark.slow
def test_a_label_is_stored_beside_whoever_holds_the_state(flywheel: Run, tasks: list[str], tmp_path: Path) -> None:
    with instance_lock(tmp_path / "state"):
        ran = flywheel("label", tasks[0], "reject", "--comment", "too long", "--json")
    assert ran.code == 0
    assert ran.json == {"id": 1, "task_id": tasks[0], "label": "reject", "criterion": "", "by": this_person()}
    [found] = flywheel("labels", "--json").json["labels"]
    assert (found["label"], found["comment"], found["by"], found["blind"]) == (
        "reject",
        "too long",
        this_person(),
        False,
    )
    assert flywheel("audit").code == 0


@pytest.mark.slow
def test_labels_are_listed_with_the_agreement(
    flywheel: Run, tasks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = {task["task_id"]: task["state"] for task in flywheel("tasks", "--json").json["tasks"]}
    for key in tasks:
        flywheel("label", key, "accept" if judged[key] != "rejected" else "reject", "--by", "alice")
    flywheel("label", tasks[0], "reject", "--by", "alice")
    report = flywheel("labels", "--json").json
    assert report["total"] == 10
    assert (report["agreement"]["judge"]["n"], report["agreement"]["judge"]["agreement"]) == (10, 0.9)
    assert report["agreement"]["judge_blind"]["n"] == 0
    monkeypatch.setenv("COLUMNS", "160")
    text = flywheel("labels", "--limit", "3").out
    assert "3 of 10 labels" in text
    assert "people and the judge: 90% agreement on 10 replies, kappa 0." in text


def test_the_file_is_read_by_calibrate(flywheel: Run, tasks: list[str], tmp_path: Path) -> None:
    assert flywheel("labels", "--out", "l.jsonl").code == 1
    flywheel("label", tasks[0], "accept", "--comment", "good")
    flywheel("label", tasks[1], "reject")
    flywheel("label", tasks[2], "unsure")
    assert flywheel("labels", "--out", "l.jsonl", "--json").json == {"out": "l.jsonl", "lines": 3, "decided": 2}
    given = read_labels(tmp_path / "l.jsonl")
    told = [(label.name, label.accept, label.reason) for label in given.labels]
    assert told == [(tasks[0], True, "good"), (tasks[1], False, "")]
    assert given.left_out == 1
    refused = flywheel("labels", "--out", "l.jsonl")
    assert (refused.code, "it exists" in refused.err) == (1, True)
    assert flywheel("labels", "--out", "l.jsonl", "--force").code == 0


def test_a_file_brings_its_labels_to_a_state_once(flywheel: Run, tasks: list[str], tmp_path: Path) -> None:
    flywheel("label", tasks[0], "accept", "--by", "alice", "--comment", "good")
    flywheel("label", tasks[0], "reject", "--by", "bob")
    flywheel("label", tasks[0], "accept", "--by", "carol")
    flywheel("labels", "--out", "l.jsonl")
    assert flywheel("labels", "import", "l.jsonl", "--json").json == {
        "file": "l.jsonl",
        "replies": 1,
        "new": 0,
        "left_out": {},
    }
    flywheel("label", tasks[0], "accept", "--by", "bob")
    assert flywheel("labels", "import", "l.jsonl").out == "1 labelled reply in l.jsonl, 1 new label\n"
    own = [{"task_id": tasks[1], "verdict": "reject", "reason": "wrong"}, {"query": "q", "answer": "a", "verdict": 1}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    assert flywheel("labels", "import", "own.jsonl", "--by", "dora", "--json").json["new"] == 1
    assert {(each["task_id"], each["by"], each["label"], each["comment"]) for each in listed(flywheel)} == {
        (tasks[0], "alice", "accept", "good"),
        (tasks[0], "bob", "reject", ""),
        (tasks[0], "carol", "accept", ""),
        (tasks[1], "dora", "reject", "wrong"),
    }
    changed = [{"task_id": tasks[1], "verdict": verdict} for verdict in ("accept", "reject", "accept")]
    (tmp_path / "changed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    imports = [flywheel("labels", "import", "changed.jsonl", "--by", "dora", "--json").json for _ in range(2)]
    assert [(ran["replies"], ran["new"]) for ran in imports] == [(1, 1), (1, 0)], "her last label counts, once"
    assert flywheel("labels", "import").code == flywheel("labels", "list", "own.jsonl").code == 2
    assert flywheel("audit").code == 0


def listed(flywheel: Run) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = flywheel("labels", "list", "--json").json["labels"]
    return rows


def test_what_is_labelled_wrongly_is_explained(flywheel: Run, tasks: list[str], tmp_path: Path) -> None:
    for arguments, code, why in (
        (["t-nobody", "accept"], 1, "cannot label t-nobody: there is no task with this id"),
        (["t-nobody", "maybe"], 2, "maybe"),
        (["t-nobody"], 2, "accept|reject|unsure"),
    ):
        ran = flywheel("label", *arguments)
        assert (ran.code, why in ran.err) == (code, True), arguments
    assert flywheel("labels").out.endswith("There are no labels yet: `flywheel label` makes one.\n")
    assert flywheel("label", "t-1", "accept", "--set", "state.dir=elsewhere").code == 1
    assert not (tmp_path / "elsewhere").exists()
