"""The list of tasks and one task, in a browser."""

from __future__ import annotations

import asyncio
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.datastructures import QueryParams

from flywheel.config.file import Config
from flywheel.records.states import Split
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.store.kernel.database import Reader
from flywheel.store.views import task_list
from flywheel.web import tasks
from flywheel.web.server import application
from tests.factories.state import in_thread, write_state
from tests.factories.trace import replies_on
from tests.factories.verdict import put_judged
from tests.factories.web import client, text_of
from tests.web.conftest import Check, serving
from tests.web.recorded_state import config_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    ["state=rejected", "criterion=correct", "lowest=0.9", "highest=0.1&adapter=unrecorded", "adapter=unrecorded",
     "adapter=r0001", "split=held-out", "stage=usable", "text=desrever",
     "judge=a-judge", "source=/no/such/file", "state=accepted&after=300", "order=oldest", "order=lowest&split=train",
     "order=highest&state=rejected", "order=oldest&after=300", "agent=demo-agent", "week=2026-11-16",
     "model=unrecorded", "rubric=a-rubric"],
)  # fmt: skip
def test_the_list_by_each_filter_is_what_the_state_holds(shared_state: Config, query: str) -> None:
    """Pages of the list together are the export, and both are what `listed` selects at once."""
    wanted = tasks.TaskSelection.of(QueryParams(query))
    order, after = wanted.place
    reader = Reader(shared_state.state_dir)
    rows = list(in_thread(reader.read(task_list.listed, wanted.conditions(shared_state.takes))))
    if order == "oldest":
        rows.reverse()
    if order in ("lowest", "highest"):
        sign = 1 if order == "lowest" else -1
        rows.sort(
            key=lambda row: (
                row.score is None,
                sign * (row.score or 0),
                (sign if row.score is not None else -1) * row.id,
            )
        )
    if after is not None:
        rows = [row for row in rows if (row.id > after.id if order == "oldest" else row.id < after.id)]
    pages = client(shared_state)
    lines = pages.get(f"/tasks.jsonl?{query}").text.split("\n")[:-1]
    found, address = [], f"/tasks?{query}"
    while address:
        page = pages.get(address).text
        found += re.findall(r'<td class="about"><a href="/tasks/([^"]+)"', page)
        following = re.search(r'<a href="([^"]+)" rel="next">', page)
        address = html.unescape(following[1]) if following else ""
    assert [json.loads(line)["task_id"] for line in lines] == found == [row.key for row in rows]
    assert bool(rows) is ("no/such" not in query)


@pytest.mark.parametrize(
    ("query", "why"),
    [("state=foo", "'foo' is none of pending, judging"), ("split=x", "'x' is none of train, held-out"),
     ("lowest=low", "'low' is not a number"), ("order=best", "'best' is none of newest, oldest"),
     ("after=x", "'x' is no place in a list"), ("stage=no-such", "There is no such selection of tasks")],
)  # fmt: skip
def test_a_selection_that_cannot_be_is_explained_on_a_page_with_navigation(
    shared_state: Config, query: str, why: str
) -> None:
    answer = client(shared_state).get(f"/tasks?{query}")
    assert answer.status_code == 400
    assert why in html.unescape(answer.text)
    assert '<nav aria-label="Pages">' in answer.text
    assert '<nav aria-label="Pages">' in client(shared_state).get("/nothing").text


def test_a_search_that_takes_long_can_be_continued(shared_state: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SEARCH_SECONDS", 0.0)
    page = client(shared_state).get("/tasks?text=desrever&after=700").text
    assert "Search further" in page and "No task matches" not in page


def test_a_verdict_shows_the_judge_s_single_answers(check: Check, shared_state: Config) -> None:
    wanted = task_list.conditions(criterion="correct", adapter="r0001")
    row = in_thread(Reader(shared_state.state_dir).read(task_list.listed, wanted, 1))[0]
    with serving(shared_state) as address:
        page = check(f"{address}/tasks/{row.key}")
        page.get_by_text("The judge's answers (1)").click()
        assert "demo-judge at" in page.inner_text("main") and "tokens sent" in page.inner_text("main")
        page.context.close()


def test_a_task_has_its_question_as_title_and_says_each_reason_once(tmp_path: Path) -> None:
    results = (
        CriterionResult("correct", "no", 0.0, False, "9 is right"),
        CriterionResult("leaks", "no", 0.0, True, "it names no key"),
    )
    verdict = Verdict(Outcome.REJECTED, 0.2, results, "score 0.20 is below 0.7; correct: 9 is right", calls=1)
    asked = replace(replies_on(Split.TRAIN, 1)[0], query="What is <b>7</b> plus 2?")
    write_state(tmp_path / "state", put_judged, asked, judge=lambda _: verdict)
    pages = client(config_of(tmp_path))
    key = json.loads(pages.get("/tasks.jsonl").text)["task_id"]
    page = pages.get(f"/tasks/{key}").text
    assert "<title>What is &lt;b&gt;7&lt;/b&gt; plus 2? · Flywheel</title>" in page
    text = text_of(page.partition("<main")[2])
    [heading] = re.findall(r"<h1>.*</h1>", page)
    assert "What is &lt;b&gt;7&lt;/b&gt; plus 2?" in heading and key not in heading
    assert text.count("9 is right") == text.count("it names no key") == text.count("score 0.20 is below 0.7") == 1
    # What is looked for and not there is good.
    assert "leaks : no ✓" in text and "correct : no ✗" in text


def test_exports_are_limited_and_read_in_turn(shared_state: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of readers that take nothing, a few are served; these have at most a part of the tasks in memory each."""
    monkeypatch.setattr(tasks, "EXPORTS", 2)
    pages = application(shared_state, names=frozenset({"testserver"}))
    reading: list[int] = []

    async def shown() -> list[int]:
        may_read, started, statuses = asyncio.Event(), asyncio.Semaphore(0), list[int]()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                started.release()
            elif message.get("more_body"):
                await may_read.wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        def asked() -> asyncio.Task[None]:
            headers = [(b"host", b"testserver")]
            scope = {"type": "http", "method": "GET", "path": "/tasks.jsonl", "query_string": b"", "headers": headers,
                     "raw_path": b"/tasks.jsonl", "http_version": "1.1", "client": ("127.0.0.1", 1)}  # fmt: skip
            return asyncio.create_task(pages({**scope, "asgi": {"version": "3.0"}}, receive, send))

        search = task_list.search

        def counted(*given: Any, **more: Any) -> Any:
            reading.append(1)
            try:
                assert len(reading) == 1, "two exports read at once"
                return search(*given, **more)
            finally:
                reading.pop()

        monkeypatch.setattr(task_list, "search", counted)
        some = [asked() for _ in range(5)]
        for _ in some:
            await started.acquire()
        ended, _ = await asyncio.wait(some, timeout=0.1)
        assert len(ended) == 3
        may_read.set()
        await asyncio.gather(*some)
        await asked()
        return statuses

    assert sorted(in_thread(shown())) == [200, 200, 200, 503, 503, 503]
