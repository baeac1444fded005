"""What was judged can be found and read: `tasks` by state, adapter, criterion and text, `show` and `why` by any id,
and by what `status` says that replies are rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.filter_bench import Bench
from tests.factories.documented_json import compare, documented
from tests.factories.state import execute
from tests.factories.trace import write_lines

GOOD, BAD, UNBOXED = "good: \\boxed{1}", "bad: \\boxed{0}", "bad, without a box"


def ids(bench: Bench, *arguments: str) -> list[str]:
    return [task["query"] for task in bench("tasks", *arguments, "--json").json["tasks"]]


@pytest.fixture
def judged(bench: Bench) -> Bench:
    bench.lines(GOOD, BAD, UNBOXED)
    bench.filter()
    bench.lines("waits")
    assert bench("ingest").code == 0
    return bench


@pytest.mark.slow
def test_tasks_are_found_by_state_adapter_criterion_and_text(judged: Bench) -> None:
    execute(judged.folder / "state" / "state.db", "UPDATE tasks SET adapter = 'agent@r0001' WHERE id = 1")
    everything = ["What is 3 plus 1?", "What is 2 plus 1?", "What is 1 plus 1?", "What is 0 plus 1?"]
    assert ids(judged) == everything, "the newest first"
    assert ids(judged, "--state", "rejected") == everything[1:3]
    assert ids(judged, "--criterion", "boxed") == everything[1:2]
    assert ids(judged, "--criterion", "correct") == everything[1:3]
    assert ids(judged, "--adapter", "r0001") == ids(judged, "--adapter", "agent@r0001") == everything[3:]
    assert ids(judged, "--adapter", "unrecorded") == everything[:3]
    assert ids(judged, "--adapter", "0001") == []
    assert ids(judged, "--text", "WITHOUT A BOX") == everything[1:2]
    assert ids(judged, "--text", "is 1 plus") == everything[2:3]
    assert ids(judged, "--text", "%") == []
    assert ids(judged, "--state", "rejected", "--text", "0 plus") == []


def test_a_list_tells_state_score_failed_criteria_and_an_excerpt(judged: Bench) -> None:
    lines = judged("tasks").out.splitlines()
    assert lines[-1] == "4"
    [told] = [line for line in lines if "2 plus 1" in line]
    for part in ("a-task-with-a-long-name-2", "rejected", "0.00", "boxed, correct, clear", "→ bad, without a box"):
        assert part in told
    assert "pending" in next(line for line in lines if "3 plus 1" in line)
    assert judged("tasks", "--limit", "2").out.splitlines()[-1] == "2 of 4; --limit N shows more"
    assert judged("tasks", "--state", "rejected").out.splitlines()[-1] == "2 rejected"


def test_a_task_is_shown_whole_with_reasons(judged: Bench) -> None:
    [task] = judged("tasks", "--criterion", "boxed", "--json").json["tasks"]
    text = judged("show", task["task_id"]).out
    order = [
        "rejected (",
        "Question\n  What is 2 plus 1?",
        "Answer\n  bad, without a box",
        "Verdict\n  rejected, score 0.00",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "✗ boxed: no  the pattern is not found" in text
    assert "✗ correct: no  it is not so" in text
    [shown] = judged("show", task["task_id"], "--json").json["tasks"]
    assert shown["verdict"]["score"] == 0.0
    assert [each["criterion"] for each in shown["verdict"]["criteria"] if not each["passed"]] == [
        "boxed",
        "correct",
        "clear",
    ]
    assert "not judged yet" in judged("show", "a-task-with-a-long-name-3").out
    ran = judged("show", "t-nothing")
    assert ran.code == 1
    assert "cannot show t-nothing" in ran.err


def test_a_row_that_is_no_task_is_shown_by_the_name_that_its_file_gives_it(bench: Bench) -> None:
    rows = {"task_id": "sum-1", "main_query": "1+1?", "answer": "2"}, {"task_id": "sum-2", "main_query": "2+2?"}
    write_lines(bench.folder / "source.jsonl", *rows)
    assert bench("ingest").code == 0
    shown, why = bench("show", "sum-2"), bench("why", "sum-2")
    assert (shown.code, shown.out) == (0, why.out)
    assert shown.out.startswith("row sum-2 of trace ")
    assert bench("show", "sum-2", "--json").json == bench("why", "sum-2", "--json").json
    assert bench("why", "sum-1").out.startswith("row sum-1 of trace ")
    assert [task["task_id"] for task in bench("show", "sum-1", "--json").json["tasks"]] == ["sum-1"]


def test_steps_and_history_are_shown(flywheel: Run, tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    line = {
        "messages": [
            {"role": "system", "content": "You add.\x1b[2J"},
            {"role": "user", "content": "1+1?"},
            {**call, "content": None},
            {"role": "tool", "name": "add", "content": "two"},
            {"role": "assistant", "content": "2"},
        ]
    }
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    config = {"state": {"dir": "state"}, "sources": [{"type": "jsonl", "path": "lines.jsonl"}]}
    (tmp_path / "flywheel.yaml").write_text(json.dumps(config))
    assert flywheel("ingest").code == 0
    [task] = flywheel("tasks", "--json").json["tasks"]
    text = flywheel("show", task["task_id"]).out
    assert "History\n  [system] You add." in text
    assert "\x1b" not in text
    assert 'Steps\n  [assistant calls add] {"a": 1}\n  [tool add] two' in text


@pytest.mark.slow
def test_status_tells_by_what_replies_are_rejected(judged: Bench) -> None:
    told = judged("status", "--json").json
    compare(told, documented("status"), "status")
    assert told["recent_verdicts"] == {
        "judged": 3,
        "accepted": 1,
        "rejected_by": {"clear": 2, "correct": 2, "boxed": 1},
    }
    assert told["warnings"] == []
    assert "rejected by 2 clear, 2 correct, 1 boxed" in judged("status").out
    assert 'flywheel_recent_rejections{criterion="correct"} 2.0' in judged("status", "--metrics").out


@pytest.mark.slow
def test_a_judge_that_accepts_nothing_is_a_loud_warning(bench: Bench) -> None:
    bench.lines(*[BAD] * 49)
    bench.filter()
    assert bench("status", "--json").json["warnings"] == []
    bench.lines(BAD)
    ran = bench("filter")
    assert ran.code == 0
    warning = "none of the last 50 judged replies was accepted (not met: correct 50, clear 50)"
    assert warning in ran.err
    assert bench("status").out.startswith("WARNING")
    assert warning in " ".join(bench("status").out.split())
    bench.lines(GOOD)
    assert "none of the last" not in bench("filter").err
    assert bench("status", "--json").json["warnings"] == []
