"""`flywheel dead-letters`, by hand: what could not go on is shown, tried again and closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.app import this_person
from flywheel.system.lock import instance_lock
from tests.cli.conftest import Ran, Run
from tests.factories.config import write_chain, write_config, write_rubric
from tests.factories.judge_server import JudgeServer
from tests.factories.state import execute
from tests.factories.trace import write_lines
from tests.sources.studio.writer import Studio, agent

BAD = {**agent("bad", trace="bad-trace", began=5, ended=6), "attributes": "{broken [red]"}


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    """Three replies, of which the middle one cannot be read."""
    (tmp_path / "flywheel.yaml").write_text("sources: [{path: studio.sqlite}]\nstate: {dir: state}\n")
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(agent("good", trace="good-trace"), BAD, agent("late", trace="late-trace", began=9, ended=10))
    return studio


def correct(studio: Studio) -> None:
    execute(studio.path, "UPDATE span_table SET attributes = ? WHERE spanId = 'bad'", agent("bad")["attributes"])


def letters(flywheel: Run, *more: str) -> Any:
    return flywheel("dead-letters", *more, "--json").json


def balanced(flywheel: Run) -> dict[str, int]:
    ran = flywheel("audit", "--json")
    assert ran.code == 0
    assert ran.json["balanced"]
    return {end: ran.json[end] for end in ("pending", "dead")}


def succeeded(ran: Ran) -> Ran:
    assert (ran.code, ran.err) == (0, "")
    return ran


def test_without_any_there_are_none(flywheel: Run, tmp_path: Path) -> None:
    write_config(tmp_path, sources=[])
    assert "Dead letters: none" in succeeded(flywheel("dead-letters")).out
    assert letters(flywheel) == {"letters": [], "open": 0, "retried": 0, "dropped": 0}
    assert succeeded(flywheel("dead-letters", "retry", "--all")).out == "no dead letter is open\n"
    assert succeeded(flywheel("dead-letters", "drop", "--all")).out == "no dead letter is open\n"


def test_a_row_that_cannot_be_read_is_shown(flywheel: Run, studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    flywheel("ingest")
    table = succeeded(flywheel("dead-letters")).out
    assert all(text in table for text in ("row", "bad", "studio.sqlite", "attributes is not JSON", "1 open"))
    assert succeeded(flywheel("dead-letters", "show")).out == table
    whole = succeeded(flywheel("dead-letters", "show", "1")).out
    assert all(
        text in whole for text in ("dead letter 1: row bad", str(studio.path), "failed 1 time,", "{broken [red]")
    )
    [letter] = letters(flywheel, "show", "1")["letters"]
    about = {"subject": "bad", "state": "open", "attempts": 1, "excerpt": "{broken [red]"}
    assert about.items() <= letter.items()
    assert [entry["state"] for entry in letter["history"]] == ["open"]
    assert flywheel("status", "--json").json["dead_letters"] == 1
    assert balanced(flywheel) == {"pending": 2, "dead": 1}


def test_a_row_that_was_corrected_becomes_a_task_when_it_is_retried(flywheel: Run, studio: Studio) -> None:
    flywheel("ingest")
    correct(studio)
    said = succeeded(flywheel("dead-letters", "retry", "1")).out
    assert "reads its trace again" in said
    assert balanced(flywheel) == {"pending": 2, "dead": 1}
    assert flywheel("ingest", "--json").json["new"] == 1
    assert letters(flywheel) == {"letters": [], "open": 0, "retried": 1, "dropped": 0}
    assert [letter["state"] for letter in letters(flywheel, "--all")["letters"]] == ["retried"]
    assert balanced(flywheel) == {"pending": 3, "dead": 0}
    assert "it is no longer dead" in flywheel("dead-letters", "retry", "1").out


def test_a_row_that_is_dropped_is_closed_and_stays_dead(flywheel: Run, studio: Studio) -> None:
    flywheel("ingest")
    with instance_lock(studio.path.parent / "state"):
        assert letters(flywheel, "drop", "1") == {"dropped": [{"id": 1, "kind": "row", "subject": "bad"}]}
    [entry] = letters(flywheel, "show", "1")["letters"]
    assert entry["history"][-1]["detail"] == f"by {this_person()}"
    flywheel("ingest", "--sweep")
    assert letters(flywheel) == {"letters": [], "open": 0, "retried": 0, "dropped": 1}
    assert "1 dropped: see --all" in flywheel("dead-letters").out
    assert flywheel("status", "--json").json["dead_letters"] == 0
    assert balanced(flywheel) == {"pending": 2, "dead": 1}
    refused = flywheel("dead-letters", "retry", "1")
    assert refused.code == 1
    assert "it was dropped, which is final" in refused.err


@pytest.mark.slow
def test_a_task_that_a_filter_broke_on_is_judged_after_a_retry(
    flywheel: Run, tmp_path: Path, judge: JudgeServer
) -> None:
    judge.verdict = lambda *_: True
    write_config(
        tmp_path,
        sources=[{"type": "jsonl", "path": "tasks.jsonl"}],
        judge={"base_url": judge.base_url, "model": "judge"},
        filter={"rubric": "rubric.yaml", "chain": "chain.yaml"},
    )
    write_rubric(tmp_path)
    write_chain(tmp_path, {"type": "python", "params": {"path": "mine.py"}}, {"type": "llm_evaluate"})
    (tmp_path / "mine.py").write_text(
        "def keep(task):\n    if task['main_query'] == 'q1':\n        raise ValueError('broken')\n"
        "    return True, ''\n"
    )
    lines = ({"question": f"q{number}", "answer": "a", "task_id": f"t{number}"} for number in (0, 1))
    write_lines(tmp_path / "tasks.jsonl", *lines)
    assert flywheel("filter", "--json").json["dead"] == 1
    [letter] = letters(flywheel)["letters"]
    assert (letter["kind"], letter["subject"], letter["source"]) == ("task", "t1", "")
    assert balanced(flywheel) == {"pending": 0, "dead": 1}
    assert "t1: the task is pending again" in succeeded(flywheel("dead-letters", "retry", "1")).out
    assert balanced(flywheel) == {"pending": 1, "dead": 0}
    assert flywheel("filter", "--json").json["dead"] == 1
    assert letters(flywheel)["letters"][0]["attempts"] == 2
    (tmp_path / "mine.py").write_text("def keep(task):\n    return True, ''\n")
    flywheel("dead-letters", "retry", "1")
    assert flywheel("filter", "--json").json["accepted"] == 1
    assert letters(flywheel)["open"] == 0
    assert balanced(flywheel) == {"pending": 0, "dead": 0}


@pytest.mark.slow
def test_a_retry_waits_for_whoever_holds_the_state(
    flywheel: Run, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.daemon.requests.WAIT_SECONDS", 0.3)
    flywheel("ingest")
    correct(studio)
    with instance_lock(studio.path.parent / "state"):
        assert letters(flywheel, "retry", "1") == {"retried": [], "queued": True}
        assert succeeded(flywheel("dead-letters", "retry", "1")).out.startswith("queued: ")
        assert letters(flywheel)["open"] == 1
    # The next command that has the state to itself does it first.
    assert flywheel("ingest", "--json").json["new"] == 1
    assert letters(flywheel) == {"letters": [], "open": 0, "retried": 1, "dropped": 0}


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["retry"], 2, "--all"),
        (["drop"], 2, "--all"),
        (["retry", "1", "--all"], 2, "--all"),
        (["burn", "1"], 2, "burn"),
        (["retry", "one"], 2, "integer"),
        (["show", "7"], 1, "cannot find dead letter 7"),
        (["retry", "1", "7"], 1, "cannot find dead letter 7"),
        (["drop", "7"], 1, "cannot find dead letter 7"),
    ],
)
def test_what_is_asked_wrongly_is_explained_and_changes_nothing(
    flywheel: Run, studio: Studio, arguments: list[str], code: int, why: str
) -> None:
    flywheel("ingest")
    flywheel("dead-letters", *arguments).fails(code, why)
    assert letters(flywheel)["open"] == 1
