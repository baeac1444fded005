"""Judging through the store: budget, means, judgements and stop, with a real judge over HTTP."""

from __future__ import annotations

import asyncio
import resource
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from flywheel.config.judge import JudgeBudget
from flywheel.daemon.judging.judging import JudgingReport, TaskJudging
from flywheel.errors import ConfigError
from flywheel.judge import usage
from flywheel.judge.thread_pool import FAILURES_IN_ROW
from flywheel.judge.usage import Budget, BudgetClock, BudgetSpentError, Purpose, Used
from flywheel.records.verdict import Outcome, Verdict
from flywheel.store import judge_usage
from flywheel.store.kernel import database, schema
from flywheel.store.kernel.database import Store
from flywheel.system import limited_call
from tests.factories.judge_server import JudgeServer, form_of
from tests.factories.judging import RUBRIC, config, states, tell
from tests.factories.trace import put_replies, reply
from tests.waiting import SOON, until


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


async def stored_verdicts(store: Store) -> list[Any]:
    return await store.read(lambda conn: conn.execute(select(schema.verdicts)).all())


async def test_a_spent_budget_leaves_the_rest_pending_and_the_status_says_why(store: Store, tmp_path: Path) -> None:
    await tell(store, 20)
    with JudgeServer(lambda *_: True) as judge:
        # 120 tokens a call: five calls.
        first = TaskJudging(store, config(tmp_path, judge, max_thread=1, budget={"tokens_per_day": 600}))
        report = await first.run()
        assert (report.judged, judge.calls) == (5, 5)
        assert report.error.retryable
        assert await states(store) == {"accepted": 5, "pending": 15}
        assert "budget of 600 tokens a day is spent" in await store.read(database.noted, database.JUDGE_NOTE)
        assert await store.read(judge_usage.tokens_today) == 600
        # A restart knows what was spent, and another limit is judging again at once.
        again = await TaskJudging(store, config(tmp_path, judge, budget={"tokens_per_day": 600})).run()
        assert (again.judged, judge.calls) == (0, 5)
        more = await TaskJudging(store, config(tmp_path, judge, max_thread=1, budget={"tokens_per_day": 840})).run()
        assert (more.judged, judge.calls) == (2, 7)
        rest = await TaskJudging(store, config(tmp_path, judge)).run()
    assert rest.error is None
    assert await states(store) == {"accepted": 20}
    assert await store.read(database.noted, database.JUDGE_NOTE) == ""


async def test_yesterday_s_tokens_are_not_today_s(store: Store) -> None:
    def yesterday(conn: Connection) -> None:
        conn.execute(
            schema.judge_days.insert().values(
                day="2020-01-01", purpose="filter", calls=1, prompt_tokens=5, completion_tokens=5
            )
        )

    await store.write(yesterday)
    assert await store.read(judge_usage.tokens_today) == 0
    for _ in range(2):
        await store.write(
            judge_usage.book_verdict, Verdict(Outcome.UNDECIDED, None, calls=1, prompt_tokens=3, completion_tokens=4)
        )
    assert await store.read(judge_usage.tokens_today) == 14


async def test_a_restart_after_the_clock_stepped_back_goes_on_with_the_later_day_s_budget(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [datetime(2026, 3, 2, 0, 5, tzinfo=UTC)]

    def restart(**step: int) -> Budget:
        now[0] += timedelta(**step)
        clock = BudgetClock(lambda: now[0])
        for module in (usage, judge_usage):
            monkeypatch.setattr(module, "CLOCK", clock)
        # As `tokens_today` of a store whose last day is this one.
        return Budget(
            JudgeBudget(tokens_per_day=1000), lambda: 1000 * (clock.today("2026-03-02") == "2026-03-02"), clock
        )

    async def book(day: str, number: int) -> int:
        used = Used(day, Purpose.ROUNDS, 1, number, 0)
        await store.write(judge_usage.book, [used])
        return await store.read(judge_usage.tokens_today)

    restart()
    assert await book("2026-03-02", 1000) == 1000
    budget = restart(minutes=-10)
    for _ in range(2):
        with pytest.raises(BudgetSpentError):
            budget.check()
    restart(minutes=1)
    assert (await store.read(judge_usage.tokens_today), usage.today()) == (1000, "2026-03-02")
    assert await book("2026-03-01", 7) == 1007, "a worker has the clock of this moment"
    assert await book("2026-02-27", 7) == 1007, "what was used earlier is of its day"
    assert not caplog.records
    restart(days=-2)
    assert await store.read(judge_usage.tokens_today) == 7
    assert await store.read(judge_usage.tokens_today) == 7
    [warning] = caplog.messages
    assert "the clock stepped back from 2026-03-02 to 2026-02-27" in warning


async def test_tokens_of_replies_that_nobody_could_read_are_spent(store: Store, tmp_path: Path) -> None:
    await tell(store, 3)
    with JudgeServer(behaviour="unknown choice") as judge:
        report = await TaskJudging(store, config(tmp_path, judge)).run()
    assert (report.undecided, judge.calls) == (3, 6)
    assert await store.read(judge_usage.tokens_today) == 720
    assert sum(row.prompt_tokens + row.completion_tokens for row in await stored_verdicts(store)) == 720


async def test_what_the_endpoint_cannot_do_is_learned_once_for_all_runs_of_a_process(
    store: Store, tmp_path: Path
) -> None:
    with JudgeServer(lambda *_: True, behaviour="no schema, no tools") as judge:
        await tell(store, 2)
        await TaskJudging(store, config(tmp_path, judge, max_thread=1)).run()
        asked = judge.calls
        await store.write(put_replies, reply(9))
        await TaskJudging(store, config(tmp_path, judge, max_thread=1)).run()
    assert [form_of(request) for request in judge.requests[asked:]] == ["text"]


async def test_every_judgement_is_stored(store: Store, tmp_path: Path) -> None:
    await tell(store, 1)
    again = {"band": [0.9, 1.0], "repeats": 3}
    answers = iter([True, False, True, False])
    with JudgeServer(lambda *_: next(answers)) as judge:
        await TaskJudging(store, config(tmp_path, judge, {**RUBRIC, "judge": {"escalate": again}})).run()
    (row,) = await stored_verdicts(store)
    assert (row.outcome, row.score, row.calls, row.prompt_tokens) == ("rejected", 0.0, 4, 400)
    told = [(each["stage"], each["outcome"], each["results"][0]["choice"]) for each in row.judgements]
    assert told == [
        ("first", "accepted", "yes"),
        ("again", "rejected", "no"),
        ("again", "accepted", "yes"),
        ("again", "rejected", "no"),
    ]
    assert {each["judge"] for each in row.judgements} == {f"j at {judge.base_url}"}


async def test_half_a_character_in_a_reason_is_stored_as_a_question_mark(store: Store, tmp_path: Path) -> None:
    await tell(store, 1)
    with JudgeServer() as judge:
        judge.behave("half a character")
        report = await TaskJudging(store, config(tmp_path, judge)).run()
    assert (report.error, report.judged) == (None, 1)
    (row,) = await stored_verdicts(store)
    assert "good ?" in row.reason


class Stop(threading.Event):
    """Knows how long its waiting threads would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        try:
            return super().wait(timeout)
        finally:
            self.waits.remove(timeout)


async def test_a_stop_ends_the_waits_between_attempts_at_once(store: Store, tmp_path: Path) -> None:
    await tell(store, 8)
    stop, day = Stop(), 86_400.0
    # All four are asked before one is answered: after the first answer the key rests, and no further call is sent.
    with JudgeServer(behaviour="503 tomorrow", hold_until=4) as judge:
        settings = config(tmp_path, judge, timeout_seconds=2 * day, daemon={"drain_seconds": 2 * day})
        running = asyncio.create_task(TaskJudging(store, settings).run(stop=stop))
        # The stop comes from outside while all threads wait as long as they were asked to.
        await until(lambda: stop.waits == [day] * 4, "all threads to wait")
        stop.set()
        await asyncio.wait_for(running, SOON)
    assert (judge.calls, await states(store)) == (4, {"pending": 8})


async def test_a_stop_waits_for_calls_in_flight_no_longer_than_it_may(store: Store, tmp_path: Path) -> None:
    await tell(store, 8)
    stop = threading.Event()
    with JudgeServer(lambda *_: True, hold_until=5) as judge:  # four threads: nobody is ever answered
        filtering = TaskJudging(store, config(tmp_path, judge, daemon={"drain_seconds": 0.3}))
        running = asyncio.create_task(filtering.run(stop=stop))
        await until(lambda: judge.calls == 4, "all threads to ask")
        stop.set()
        report = await asyncio.wait_for(running, SOON)
        assert (report.judged, await states(store)) == (0, {"pending": 8})
        judge.let_go()


async def test_a_stop_keeps_what_is_answered_in_time(store: Store, tmp_path: Path) -> None:
    await tell(store, 8)
    stop = threading.Event()
    with JudgeServer(lambda *_: True, hold_until=5) as judge:
        filtering = TaskJudging(store, config(tmp_path, judge, daemon={"drain_seconds": 60}))
        running = asyncio.create_task(filtering.run(stop=stop))
        await until(lambda: judge.calls == 4, "all threads to ask")
        stop.set()
        threading.Timer(0.3, judge.let_go).start()
        await running
    assert await states(store) == {"accepted": 4, "pending": 4}


async def test_a_judge_that_is_away_costs_nothing_but_delay(store: Store, tmp_path: Path) -> None:
    await tell(store, 40)
    with JudgeServer(lambda *_: True, behaviour="500") as judge:
        away: JudgingReport = await TaskJudging(store, config(tmp_path, judge, max_attempts=1)).run()
        assert away.error.retryable
        most = FAILURES_IN_ROW + 2 * 4
        assert FAILURES_IN_ROW <= judge.calls <= most
        counts = await states(store)
        assert counts["pending"] >= 40 - most
        assert counts.keys() <= {"pending", "undecided"}
        assert "in a row" in await store.read(database.noted, database.JUDGE_NOTE)
        assert await store.read(judge_usage.tokens_today) == 0
        judge.behave("good")
        await TaskJudging(store, config(tmp_path, judge, retry_undecided_seconds=0)).run()
        counts = await states(store)
    assert counts["accepted"] == 40 - counts["undecided"]


CHECKED: dict[str, Any] = {
    "id": "r",
    "threshold": 0.7,
    "criteria": [{"id": "schema", "type": "json-schema", "value": {"type": "object"}}],
}
"""Its check runs in a child process."""


@pytest.mark.slow
async def test_too_many_open_files_make_no_dead_letters(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, (soft, hard), one = limited_call._start, resource.getrlimit(resource.RLIMIT_NOFILE), threading.Lock()

    def start_without_files() -> Any:
        with one:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                return start()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    await store.write(put_replies, *(reply(n, answer="{}") for n in range(30)))
    with JudgeServer() as judge:
        judging = TaskJudging(store, config(tmp_path, judge, CHECKED))
        with monkeypatch.context() as during:
            during.setattr(limited_call, "_start", start_without_files)
            report = await judging.run()
        assert report.error is not None and report.error.retryable
        assert "too many open files" in str(report.error) and "LimitNOFILE" in str(report.error)
        # Each thread met it at most once; then judging paused.
        after = await states(store)
        assert after["undecided"] <= 4 and after["undecided"] + after["pending"] == 30
        assert "too many open files" in await store.read(database.noted, database.JUDGE_NOTE)
        await store.write(lambda conn: conn.execute(update(schema.tasks).values(retry_at="")))
        assert (await judging.run()).error is None
    assert await states(store) == {"accepted": 30}


def test_a_rubric_that_names_the_trained_model_is_refused(tmp_path: Path) -> None:
    with JudgeServer() as judge:
        own = config(tmp_path, judge, {**RUBRIC, "judge": {"model": "my-agent"}})
        with pytest.raises(ConfigError, match=r"judge\.allow_self"):
            TaskJudging(None, own)  # type: ignore[arg-type]


async def test_judge_costs_and_errors_are_recorded_with_the_verdicts(store: Store, tmp_path: Path) -> None:
    await tell(store, 3)
    prices = {"input_per_million": 1_000_000, "output_per_million": 0}

    def read(conn: Connection) -> list[list[Any]]:
        tables = schema.judge_models, schema.judge_costs, schema.judge_errors, schema.rubrics
        return [list(conn.execute(select(table))) for table in tables]

    with JudgeServer(behaviour="unknown choice") as judge:
        url = judge.base_url.replace("http://", "http://name:secret@")
        judging = TaskJudging(store, config(tmp_path, judge, base_url=url, prices=prices, retry_undecided_seconds=0))
        assert (await judging.run()).undecided == 3
        judges, costs, errors, rubrics = await store.read(read)
        sent = sum(row.prompt_tokens for row in await stored_verdicts(store))
        assert [(row.hash, row.model, row.endpoint) for row in judges] == [
            (judging.grader.judge_hash, "j", judge.base_url)
        ]
        assert [(row.hash, row.name) for row in rubrics] == [(judging.rubric.hash, judging.rubric.id)]
        assert [(row.purpose, row.currency, row.amount) for row in costs] == [("filter", "USD", sent)]
        assert sum(row.count for row in errors) == 3
