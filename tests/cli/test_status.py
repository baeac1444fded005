"""What `flywheel status` says that nobody would look for, and how replies without a task are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flywheel.cli.status import _calls
from flywheel.config.file import load
from flywheel.records.skipping import MIN_REPLIES, REMEDIES
from flywheel.records.states import SkipReason, Split
from flywheel.web.server import application
from tests.cli.conftest import Run
from tests.cli.filter_bench import Bench
from tests.factories.config import write_config
from tests.factories.state import in_thread, write_state
from tests.factories.trace import on_both_sides, put_replies, replies_on, reply, write_lines
from tests.factories.web import asgi_client


@pytest.mark.parametrize("side", Split)
def test_a_side_that_stays_empty_is_explained(flywheel: Run, tmp_path: Path, side: Split) -> None:
    first, *_ = replies_on(side, 1, query="Hello?")
    write_state(tmp_path / "home", put_replies, first, *(reply(1000 + n, query="Hello?") for n in range(99)))
    told = flywheel("status", "--json").json["warnings"]
    empty = "held out" if side is Split.TRAIN else "for training"
    why = "all 100 conversations begin alike, and such conversations are in one split"
    assert told == [f"no task is {empty}: {why}"]
    assert told[0] in flywheel("status").out


def test_nothing_is_said_where_both_sides_have_some_or_there_is_nothing(flywheel: Run, tmp_path: Path) -> None:
    assert flywheel("status", "--json", "--set", "sources=[]").json["warnings"] == []
    write_state(tmp_path / "home", put_replies, *on_both_sides(2, 1))
    assert flywheel("status", "--json").json["warnings"] == []
    # Few conversations and the ratio explain an empty side, too.
    state, books = tmp_path / "few", [reply(n, query=f"Who wrote book {n}?") for n in (1, 2)]
    write_state(state, put_replies, *books, train_ratio=1.0)
    (told,) = flywheel("status", "--json", "--set", f"state.dir={state}", "--set", "ingest.train_ratio=1.0").json[
        "warnings"
    ]
    assert "no task is held out: by ingest.train_ratio 1 about 0% of conversations are" in told
    assert "2 conversations begin in 2 ways" in told


def test_status_says_how_many_conversations_are_missing(flywheel: Run, tmp_path: Path) -> None:
    write_lines(tmp_path / "lines.jsonl", {"question": "1+1?", "answer": "2"})
    write_config(tmp_path, sources=[{"type": "jsonl", "path": "lines.jsonl"}])
    assert flywheel("ingest").code == 0
    missing = flywheel("status", "--json").json["gate"]["missing"]
    assert missing > 30
    told = flywheel("status").out
    assert f"0 held out for the gate (0 conversations, {missing} more needed)" in told
    assert f"waiting for {missing} more held-out conversations (0 of {missing}, for 30% power" in told


CUT = "tasks.jsonl was cut by another program"


@pytest.mark.slow
@pytest.mark.parametrize("command", [("filter",), ("ingest",), ("run", "--once")])
def test_a_task_file_that_another_program_has_cut_is_told(bench: Bench, command: tuple[str, ...]) -> None:
    bench.lines(*["a good answer"] * 6)
    assert CUT not in bench("filter").err + bench("status").out
    path = bench.folder / "state" / "tasks.jsonl"
    os.truncate(path, path.stat().st_size // 2)
    for _ in range(2):
        assert CUT in bench(*command).err
        assert CUT in " ".join(bench("status").out.split())
        assert any(CUT in each for each in bench("status", "--json").json["warnings"])
        bench.lines("another good answer")


def test_calls_that_were_refused_or_are_to_be_erased_are_shown() -> None:
    calls = {"condition": "ok", "calls": 7, "missed": 0, "dropped": 0, "refused": 1_200, "to_erase": 3}
    assert _calls(calls) == "calls: 7 pulled, 1,200 were not to be recorded, 3 to be erased there"


UNANSWERED = [{"question": f"Who wrote book {number}?"} for number in range(MIN_REPLIES)]
LACKS = "none of answer, metadata.answer, completion"
REMEDY = REMEDIES[SkipReason.NO_ANSWER]


def test_a_source_whose_replies_are_all_skipped_is_a_warning_until_one_is_a_task(
    flywheel: Run, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "lines.jsonl", *UNANSWERED[1:])
    write_config(tmp_path, sources=[{"type": "jsonl", "path": path.name}])
    assert flywheel("ingest", "--json").json["sources"][0]["warnings"] == []
    write_lines(path, *UNANSWERED)
    [read] = flywheel("ingest", "--json").json["sources"]
    assert read["skipped"] == {"no_answer": MIN_REPLIES}
    [warning] = read["warnings"]
    assert f"{path}: all {MIN_REPLIES} replies are skipped as `no_answer` ({LACKS}" in warning and REMEDY in warning
    # A pass without new lines says so as well.
    again = flywheel("ingest").out
    assert f"skipped: {MIN_REPLIES} no_answer" in again and REMEDY in again
    [shown] = flywheel("status", "--json").json["sources"]
    assert (shown["skipped"], shown["warning"]) == ({"no_answer": MIN_REPLIES}, warning)
    told = flywheel("status").out
    assert f"skipped: {MIN_REPLIES} no_answer" in told and REMEDY in told
    write_lines(path, *UNANSWERED, {"question": "Who?", "answer": "Goethe"})
    [read] = flywheel("ingest", "--json").json["sources"]
    assert (read["tasks"], read["warnings"]) == (1, [])
    assert flywheel("status", "--json").json["sources"][0]["warning"] == ""


def test_the_list_of_tasks_says_which_replies_are_none(flywheel: Run, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "lines.jsonl", *UNANSWERED[:2], {"answer": "without a question"})
    write_config(tmp_path, sources=[{"type": "jsonl", "path": path.name}])
    assert flywheel("ingest").code == 0
    said = flywheel("tasks").out.splitlines()
    assert said == [
        f"2 replies are no task: no_answer. {REMEDY}",
        f"1 reply is no task: no_query. {REMEDIES[SkipReason.NO_QUERY]}",
    ]
    assert flywheel("tasks", "--json").json == {"total": 0, "tasks": [], "skipped": {"no_answer": 2, "no_query": 1}}
    write_lines(path, *UNANSWERED[:2], {"question": "Who?", "answer": "Goethe"})
    assert flywheel("ingest").code == 0
    found = flywheel("tasks", "--json").json
    assert (found["total"], found["skipped"]) == (1, {"no_answer": 2, "no_query": 1})
    # Of a selection nobody knows which replies would be in it.
    assert flywheel("tasks", "--json", "--state", "pending").json["skipped"] is None
    said = flywheel("tasks").out.splitlines()
    assert any(REMEDY in line for line in said) and said[-1] == "1"
    assert "no task" not in flywheel("tasks", "--state", "pending").out


def test_the_page_counts_the_reasons_of_each_source(flywheel: Run, tmp_path: Path) -> None:
    write_lines(tmp_path / "lines.jsonl", *UNANSWERED, {"answer": "without a question"})
    write_lines(tmp_path / "others.jsonl", *UNANSWERED[:2])
    sources = [{"type": "jsonl", "path": name} for name in ("lines.jsonl", "others.jsonl")]
    config = load(write_config(tmp_path, sources=sources))
    assert flywheel("ingest").code == 0

    async def overview() -> str:
        async with asgi_client(application(config), accept="text/html") as asked:
            return str((await asked.get("/")).text)

    page = in_thread(overview())
    rows = page[page.index('id="conditions"') :].split("<tr>")
    [lines] = [row for row in rows if "lines.jsonl" in row]
    [others] = [row for row in rows if "others.jsonl" in row]
    assert f"<td>{MIN_REPLIES} no_answer, 1 no_query</td>" in lines and "<td>2 no_answer</td>" in others
