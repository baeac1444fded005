"""What traces, labels and the judge say does not command the terminal in any command; programs get it exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ran, Run
from tests.cli.terminal import COMMANDS, EVIL
from tests.factories.config import write_config, write_rubric
from tests.factories.judge_server import JudgeServer
from tests.factories.trace import write_lines


class EvilJudge(JudgeServer):
    def content(self, request: dict[str, Any]) -> dict[str, Any]:
        said = super().content(request)
        for criterion in said["criteria"].values():
            criterion["reason"] = EVIL
        return said


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with EvilJudge(lambda _question, answer: "good" in answer) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path, judge: JudgeServer) -> Path:
    lines = [
        {
            "task_id": f"t{number}{EVIL}",
            "main_query": f"question {number} {EVIL}",
            "answer": f"{'good' if number else 'bad'} {EVIL}",
            "metadata": {"conversation_id": f"c{EVIL}{number}", "agent_name": EVIL, "trace_id": f"trace{EVIL}"},
        }
        for number in range(3)
    ]
    bad = json.dumps({"task_id": EVIL, "main_query": ["bad"]})
    write_lines(tmp_path / "source.jsonl", *lines, bad, EVIL)
    label = {"query": EVIL, "answer": EVIL, "verdict": "accept", "name": EVIL, "reason": EVIL}
    write_lines(tmp_path / "labels.jsonl", label, label)
    criteria = [{"id": "right", "value": "It is right.", "weight": 1}]
    for name, threshold in (("rubric", 0.7), ("old", 0.0)):
        write_rubric(tmp_path, name=f"{name}.yaml", id=name, threshold=threshold, criteria=criteria)
    write_config(
        tmp_path,
        sources=[{"type": "jsonl", "path": "source.jsonl"}],
        judge={"base_url": judge.base_url, "model": "judge", "max_attempts": 1},
        filter={"rubric": "rubric.yaml"},
    )
    return tmp_path


def safe(ran: Ran, *, code: int = 0) -> Ran:
    assert ran.code == code, ran.err
    assert not COMMANDS.findall(ran.out + ran.err)
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["60", "160"])
def test_no_command_lets_a_text_command_the_terminal(
    flywheel: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    safe(flywheel("ingest"))
    for arguments in (["--dry-run"], ["--against", "old.yaml"], ["--estimate"], []):
        told = safe(flywheel("filter", *arguments)).out
        assert "evil" in told or arguments == ["--estimate"]
    assert "evil" in safe(flywheel("tasks", "--state", "accepted")).out
    listed = flywheel("tasks", "--state", "accepted", "--json").json["tasks"]
    assert all(EVIL in task["query"] for task in listed), "programs get it exact"
    for task in listed:
        for name in ("task_id", "conversation_id"):
            assert "evil" in safe(flywheel("why", task[name])).out
    assert "evil" in safe(flywheel("why", "not-there" + EVIL), code=1).err
    calibrated = safe(flywheel("rubric", "calibrate", "rubric.yaml", "--labels", "labels.jsonl"))
    assert "evil" in calibrated.out
    safe(flywheel("dead-letters"))
    numbers = [str(letter["id"]) for letter in flywheel("dead-letters", "--json").json["letters"]]
    assert "evil" in safe(flywheel("dead-letters", "show", *numbers)).out
    safe(flywheel("dead-letters", "retry", "--all"))
    for command in (["status"], ["audit", "--deep"], ["ingest"]):
        safe(flywheel(*command))


def test_a_line_in_a_text_is_no_line_of_ours(flywheel: Run, folder: Path) -> None:
    line = {"task_id": "t", "main_query": "q", "answer": "good", "metadata": {"agent_name": "a\nbalanced"}}
    (folder / "source.jsonl").write_text(json.dumps(line) + "\n")
    flywheel("ingest")
    assert "balanced" not in flywheel("why", "t").out.splitlines()
