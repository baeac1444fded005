"""`flywheel tasks`: listing, releasing and rejecting what is set aside."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from flywheel.cli.app import this_person
from flywheel.judge.filters.deduplication import fingerprint
from flywheel.records.states import TaskState
from flywheel.store import deduplication
from flywheel.store.kernel import schema
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.documented_json import compare, documented
from tests.factories.state import write_state
from tests.factories.trace import put_replies, reply


@pytest.fixture
def held(tmp_path: Path) -> list[str]:
    """The keys of three held tasks; a fourth is pending."""

    def fill(conn: Connection) -> list[str]:
        put_replies(conn, *(reply(n, query="What is all this?") for n in range(3)), reply(9))
        rows = conn.execute(select(schema.tasks).order_by(schema.tasks.c.id)).all()
        entries = [deduplication.ComparedTask(row.id, row.key, fingerprint(row.payload, 0.8)) for row in rows]
        deduplication.enter(conn, entries, 0.8)
        assert deduplication.hold_bursts(conn, [rows[0].id], 3, 60) == [1, 2, 3]
        return [row.key for row in rows[:3]]

    keys: list[str] = write_state(tmp_path / "home", fill)
    return keys


def test_what_is_held_is_listed(flywheel: Run, held: list[str]) -> None:
    shown = flywheel("tasks", "--state", "held", "--json").json
    assert [task["task_id"] for task in shown["tasks"]] == held[::-1]
    assert {task["like"] for task in shown["tasks"]} == {held[0]}
    assert {task["origin"] for task in shown["tasks"]} == {"source /a"}
    text = flywheel("tasks", "--state", "held").out
    assert "source /a" in text
    assert "What is all this?" in text
    assert text.endswith("3 held\n")
    assert flywheel("tasks", "--state", "pending").out.endswith("1 pending\n")
    assert len(flywheel("tasks", "--state", "held", "--limit", "2", "--json").json["tasks"]) == 2
    assert flywheel("tasks", "--state", "nonsense").code == 2


def test_one_is_released_and_the_others_are_rejected(flywheel: Run, held: list[str]) -> None:
    assert flywheel("tasks", "release", held[1]).out == "1 released\n"
    rejected = flywheel("tasks", "reject", "--all", "--json").json
    compare(rejected, documented("tasks reject"), "tasks reject")
    assert rejected == {"rejected": [held[0], held[2]]}
    assert flywheel("tasks", "--state", "held", "--json").json["tasks"] == []
    states = {
        n: task["task_id"] for n, task in enumerate(flywheel("tasks", "--state", "rejected", "--json").json["tasks"])
    }
    assert list(states.values()) == [held[2], held[0]]
    story = flywheel("why", held[0], "--json").json["replies"][0]["task"]
    assert story["verdicts"][0]["reason"] == "rejected by a person"
    assert story["history"][-1]["detail"] == f"rejected by {this_person()}"
    assert flywheel("audit").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["release"], 2, "or --all"), (["reject"], 2, "or --all"), (["release", "--all", "t-1"], 2, "or --all"),
        (["--state", "pending", "reject", "--all"], 2, "--state"),
        (["--limit", "1", "reject", "--all"], 2, "--limit"),
        (["release", "t-nobody"], 1, "cannot release t-nobody: no held task has this id"),
        (["--state", "helt"], 2, "'helt' is not one of 'pending'"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_explained_and_changes_nothing(
    flywheel: Run, held: list[str], arguments: list[str], code: int, why: str
) -> None:
    ran = flywheel("tasks", *arguments, *(held[:1] if "t-nobody" in arguments else ()))
    assert (ran.code, why in ran.err, "Value error" in ran.err) == (code, True, False)
    assert len(flywheel("tasks", "--state", "held", "--json").json["tasks"]) == 3


def test_a_mistyped_adapter_is_suggested_and_an_empty_state_says_so(
    flywheel: Run, held: list[str], tmp_path: Path
) -> None:
    told = flywheel("tasks", "--adapter", "bsae").out
    assert told == "No task matches. There is no adapter bsae: did you mean base?\n"
    write_config(tmp_path, sources=[])
    assert flywheel("tasks", "--state", "held").out == "No task matches.\n"
    assert flywheel("tasks").out == "There are no tasks yet: `flywheel ingest` reads the sources.\n"


def test_a_released_task_is_not_held_again(flywheel: Run, held: list[str], tmp_path: Path) -> None:
    flywheel("tasks", "release", "--all")
    assert write_state(tmp_path / "home", lambda conn: deduplication.hold_bursts(conn, [1, 2, 3], 2, 60)) == []
    assert flywheel("tasks", "--state", TaskState.PENDING.value).out.endswith("4 pending\n")


def test_options_before_the_verb_count_as_those_behind_it(flywheel: Run, held: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("state: {dir: elsewhere}\nsources: []\n")
    ran = flywheel("tasks", "-c", other, "--json", "reject", "--all")
    assert ran.json == {"rejected": []}
    assert [task["task_id"] for task in flywheel("tasks", "--state", "held", "--json").json["tasks"]] == held[::-1]
    (tmp_path / "flywheel.yaml").write_text("state: {dir: elsewhere}\nsources: []\n")
    other.write_text("state: {dir: home}\nsources: []\n")
    assert flywheel("tasks", "-c", other, "release", "--all", "--json").json == {"released": held}
