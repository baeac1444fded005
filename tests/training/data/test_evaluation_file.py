"""The answers of the gate are read for the tasks that are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.errors import StoreError
from flywheel.training.data.rollout_file import read_answers
from tests.factories.round import put_answers


def test_the_answers_about_some_tasks(tmp_path: Path) -> None:
    put_answers(tmp_path, ["t-1", "t-10", "t-2"])
    path = tmp_path / "evaluation.jsonl"
    with path.open("ab") as file:
        file.write(b'{"task_id":"t-1","side":"cand')
    found = read_answers(path, {"t-1"})
    assert found is not None
    assert [(each["task_id"], each["side"], each["seed"], each["reward"]) for each in found] == [
        ("t-1", "candidate", 0, 0.0),
        ("t-1", "candidate", 1, 1.0),
        ("t-1", "deployed", 0, 1.0),
        ("t-1", "deployed", 1, 0.0),
    ]
    assert read_answers(path, set()) == []


def test_answers_about_a_suite_are_not_those_about_a_held_out_task_of_the_same_id(tmp_path: Path) -> None:
    put_answers(tmp_path, ["math/t-1"])
    path = tmp_path / "evaluation.jsonl"
    of_suite = path.read_bytes().replace(b'{"task_id"', b'{"suite":"math","task_id"')
    path.write_bytes(path.read_bytes() + of_suite)
    assert of_suite.count(b'"suite"') == 4
    assert len(read_answers(path, {"math/t-1"}) or ()) == 4


def test_a_file_that_retention_removed_has_no_answers(tmp_path: Path) -> None:
    assert read_answers(tmp_path / "evaluation.jsonl", {"t-1"}) is None


def test_a_line_that_is_no_answer_is_named(tmp_path: Path) -> None:
    put_answers(tmp_path, ["t-1"])
    path = tmp_path / "evaluation.jsonl"
    path.write_bytes(path.read_bytes() + b'{"task_id":"t-1"}\n')
    with pytest.raises(StoreError, match="line 5 is no answer"):
        read_answers(path, {"t-1"})
