"""`flywheel labels import` of annotations by trace and span."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from flywheel.records.states import SkipReason
from flywheel.records.task import task_id
from tests.cli.conftest import Run
from tests.factories.state import write_state
from tests.factories.trace import put_replies, reply
from tests.factories.verdict import judge_all

ALONE = "4bf92f3577b34da6a3ce929d0e0e4736"
SEVERAL = "0af7651916cd43dd8448eb211c80319c"
SKIPPED = "1" * 32
MIXED = "2" * 32
SPANS = ["00f067aa0ba902b7", "b7ad6b7169203331", "c8be7c827a314442", "d9cf8d938b425553"]


def put(conn: Connection) -> None:
    """A trace with one reply, one with two, one whose reply is no task, and one with a task and a skipped reply."""
    put_replies(
        conn,
        reply(1, trace_id=ALONE, span_id=SPANS[0]),
        reply(2, trace_id=SEVERAL, span_id=SPANS[1]),
        reply(3, trace_id=SEVERAL, span_id=SPANS[2]),
        reply(4, trace_id=SKIPPED, span_id=SPANS[3], skip=SkipReason.ERROR),
        reply(5, trace_id=MIXED, span_id="5" * 16),
        reply(6, trace_id=MIXED, span_id="6" * 16, skip=SkipReason.NESTED),
    )
    judge_all(conn)


@pytest.fixture
def imported(flywheel: Run, tmp_path: Path) -> Callable[..., Any]:
    """What `labels import --json` reports about annotations."""
    (tmp_path / "flywheel.yaml").write_text("state: {dir: state}\nsources: []\n")
    write_state(tmp_path / "state", put)

    def run(*lines: dict[str, Any], options: tuple[str, ...] = ()) -> Any:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ran = flywheel("labels", "import", "a.jsonl", "--by", "me", *options, "--json")
        assert ran.code == 0
        return ran.json

    return run


def listed(flywheel: Run) -> list[tuple[str, str, str, str, str]]:
    names = ("criterion", "label", "by", "at", "comment")
    return [tuple(each[name] for name in names) for each in flywheel("labels", "--json").json["labels"]]  # type: ignore[misc]


def test_importing_twice_changes_nothing_and_people_and_times_are_kept(
    flywheel: Run, imported: Callable[..., Any]
) -> None:
    lines = [
        {"trace_id": ALONE, "verdict": "reject", "by": "ann", "at": "2026-11-20T10:00:00Z", "comment": "wrong"},
        {"trace_id": ALONE, "verdict": "accept", "by": "bob", "at": "2026-11-20T11:00:00Z"},
        {"trace_id": ALONE, "verdict": "bad", "by": "ann", "at": "2026-11-19T10:00:00Z", "criterion": "correct"},
        {"trace_id": ALONE, "verdict": "good", "by": "ann", "at": "2026-11-18T10:00:00Z"},
    ]
    later = "a later one by the same person replaces it"
    assert imported(*lines) == {"file": "a.jsonl", "replies": 1, "new": 3, "left_out": {later: 1}}
    wanted = [
        ("", "accept", "bob", "2026-11-20T11:00:00.000+00:00", ""),
        ("", "reject", "ann", "2026-11-20T10:00:00.000+00:00", "wrong"),
        ("correct", "reject", "ann", "2026-11-19T10:00:00.000+00:00", ""),
    ]
    assert sorted(listed(flywheel)) == wanted
    assert imported(*reversed(lines))["new"] == 0
    assert sorted(listed(flywheel)) == wanted
    # A stored label that is newer counts.
    flywheel("label", task_id(ALONE, SPANS[0]), "unsure", "--by", "bob")
    assert imported(*lines)["new"] == 0
    # Without times the last of the file counts.
    untimed = [{"trace_id": ALONE, "verdict": verdict, "by": "eve"} for verdict in ("good", "bad", "good")]
    assert (imported(*untimed)["new"], imported(*untimed)["new"]) == (1, 0)
    assert flywheel("audit").code == 0


def test_a_reply_is_found_by_its_span_or_its_trace(flywheel: Run, imported: Callable[..., Any]) -> None:
    inner = "eeeeeeeeeeeeeeee"
    report = imported(
        {"trace_id": ALONE.upper(), "span_id": inner, "verdict": "good", "by": "a"},
        {"trace_id": f"tr-{ALONE}", "verdict": "good", "by": "b"},
        {"span_id": SPANS[1].upper(), "verdict": "good", "by": "c"},
        {"trace_id": SEVERAL, "span_id": SPANS[2], "verdict": "bad", "by": "d"},
        {"trace_id": SEVERAL, "verdict": "bad", "by": "e"},
        {"trace_id": SEVERAL, "span_id": inner, "verdict": "bad", "by": "f"},
        {"trace_id": SKIPPED, "verdict": "bad", "by": "g"},
        {"trace_id": MIXED, "verdict": "bad", "by": "k"},
        {"trace_id": MIXED, "span_id": inner, "verdict": "bad", "by": "l"},
        {"trace_id": MIXED, "span_id": "6" * 16, "verdict": "bad", "by": "m"},
        {"span_id": inner, "verdict": "bad", "by": "h"},
        {"trace_id": "f" * 32, "span_id": SPANS[0], "verdict": "bad", "by": "i"},
        {"verdict": "bad", "by": "j"},
    )
    assert report == {
        "file": "a.jsonl",
        "replies": 4,
        "new": 5,
        "left_out": {
            "its trace has several replies, and it does not name the span of one of them": 3,
            "its reply is no task; `flywheel why TRACE` says why": 2,
            "no reply of its span is in the state": 1,
            "no reply of its trace is in the state": 1,
            "it names neither a trace nor a span": 1,
        },
    }
    tasks = [task_id(ALONE, SPANS[0]), *(task_id(SEVERAL, span) for span in SPANS[1:3]), task_id(MIXED, "5" * 16)]
    found = {(each["by"], each["task_id"]) for each in flywheel("labels", "--json").json["labels"]}
    assert found == {("a", tasks[0]), ("b", tasks[0]), ("c", tasks[1]), ("d", tasks[2]), ("k", tasks[3])}


def test_names_are_criteria_unless_they_are_said_to_be_of_the_whole(
    flywheel: Run, imported: Callable[..., Any], tmp_path: Path
) -> None:
    lines = [
        {"traceId": ALONE, "name": "correct", "value": 4, "source": "ANNOTATION", "authorUserId": "u1"},
        {"traceId": ALONE, "name": "overall", "value": 2, "source": "ANNOTATION", "authorUserId": "u1"},
        {"traceId": ALONE, "name": "overall", "value": 5, "source": "API"},
    ]
    unknown = "its verdict has no criterion 'overall', but correct; --name overall stores it on the whole reply"
    by_api = "it was made by API, not by a person; --also API takes it"
    report = imported(*lines, options=("--accept-from", "3"))
    assert report["left_out"] == {by_api: 1, unknown: 1}
    report = imported(*lines, options=("--accept-from", "3", "--name", "overall", "--also", "API"))
    assert (report["new"], report["left_out"]) == (2, {})
    assert {each[:3] for each in listed(flywheel)} == {
        ("correct", "accept", "u1"),
        ("", "reject", "u1"),
        ("", "accept", "API"),
    }
    text = flywheel("labels", "import", "a.jsonl", "--accept-from", "3").out
    assert text.splitlines() == [
        "1 labelled reply in a.jsonl, 0 new labels",
        f"left out 1: {by_api}",
        f"left out 1: {unknown}",
    ]


def test_lines_of_a_label_file_without_a_task_are_counted(flywheel: Run, imported: Callable[..., Any]) -> None:
    lines = [
        {"query": "q", "answer": "a", "verdict": "good"},
        {"query": "q", "answer": "a", "verdict": "bad", "task_id": "t-of-another-state"},
        {"query": "q", "answer": None, "verdict": "bad"},
    ]
    left_out = {"it names no task of the state": 2, "it has no answer or no verdict": 1}
    assert imported(*lines) == {"file": "a.jsonl", "replies": 0, "new": 0, "left_out": left_out}
