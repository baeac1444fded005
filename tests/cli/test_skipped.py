"""Replies without a task are counted by reason, and a source that has no others is a warning."""

from __future__ import annotations

from pathlib import Path

from flywheel.config.file import load
from flywheel.records.skipping import MIN_REPLIES, REMEDIES
from flywheel.records.states import SkipReason
from flywheel.web.server import application
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.state import in_thread
from tests.factories.trace import write_lines
from tests.factories.web import asgi_client

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
