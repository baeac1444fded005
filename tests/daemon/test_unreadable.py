"""A judge whose answers cannot be read is not paid for ever, and neither is a task that it never decides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from flywheel.config.judge import JudgeSettings
from flywheel.daemon.judging.judging import TaskJudging
from flywheel.daemon.service import Service
from flywheel.errors import EXIT_UNAVAILABLE, JudgeError
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.file import parse_rubric
from flywheel.judge.usage import Purpose
from flywheel.records.states import DeadLetterState
from flywheel.records.verdict import Exchange
from flywheel.store import dead_letters
from flywheel.store.kernel import database, schema
from flywheel.store.kernel.database import Store
from flywheel.store.views.balance import balance
from tests.cli.conftest import Run
from tests.cli.filter_bench import Bench
from tests.factories.judge_server import JudgeServer
from tests.factories.judging import RUBRIC, config, states, tell
from tests.waiting import until

PROSE = "ignoring, nonsense"
TASKS, THREADS, MOST = 100, 16, 16
ATTEMPTS = 2


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.slow
def test_filter_ends_with_69_after_a_bounded_number_of_calls_and_the_next_run_asks_about_one_task(
    flywheel: Run, tmp_path: Path
) -> None:
    with JudgeServer(behaviour=PROSE) as judge:
        bench = Bench(flywheel, tmp_path, judge)
        bench.settings = {"max_thread": THREADS, "max_attempts": ATTEMPTS}
        bench.rubric(RUBRIC["criteria"])
        bench.lines(*["good: \\boxed{1}"] * TASKS)
        ran = bench("filter")
        assert ran.code == EXIT_UNAVAILABLE
        assert "times in a row no answer could be read" in ran.err and "it said: result: GOOD" in ran.err
        # Those that made the streak, and those that were in flight by then.
        in_streak = MOST + THREADS - 1
        assert ATTEMPTS * MOST <= judge.calls <= ATTEMPTS * in_streak
        for _ in range(3):
            before = judge.calls
            again = bench("filter", "--json")
            assert again.code == EXIT_UNAVAILABLE and again.json["judged"] == 1
            assert judge.calls - before == ATTEMPTS
        assert "no answer could be read" in bench("status").out
        judge.behave("good")
        well = bench("filter", "--json")
        assert well.code == 0 and well.json["accepted"] >= TASKS - in_streak - 3
        assert well.json["undecided"] == 0


@pytest.mark.slow
def test_another_judge_is_asked_at_once(flywheel: Run, tmp_path: Path) -> None:
    with JudgeServer(behaviour=PROSE) as judge:
        bench = Bench(flywheel, tmp_path, judge)
        bench.settings = {"max_thread": 2, "max_unreadable": 3}
        bench.lines(*["good: \\boxed{1}"] * 20)
        assert bench("filter").code == EXIT_UNAVAILABLE
        bench.settings["max_tokens"] = 4000
        judge.behave(PROSE, PROSE, PROSE, PROSE, *["good"] * 99)
        assert bench("filter", "--json").code == 0, "two unreadable answers are no streak of three"


@pytest.mark.slow
def test_a_single_readable_answer_ends_the_streak(flywheel: Run, tmp_path: Path) -> None:
    with JudgeServer(behaviour=[*[PROSE] * 3, "good"]) as judge:
        bench = Bench(flywheel, tmp_path, judge)
        bench.settings = {"max_thread": 1, "max_unreadable": 4, "max_attempts": 1}
        bench.lines(*["good: \\boxed{1}"] * 30)
        shown = bench("filter", "--json")
    assert shown.code == 0
    assert shown.json["undecided"] > 4 and shown.json["accepted"] > 4


@pytest.mark.slow
def test_a_comparison_of_rubrics_ends_as_well(flywheel: Run, tmp_path: Path) -> None:
    with JudgeServer(behaviour=PROSE) as judge:
        bench = Bench(flywheel, tmp_path, judge)
        bench.settings = {"max_thread": 2, "max_attempts": ATTEMPTS}
        bench.lines(*["good: \\boxed{1}"] * TASKS)
        old = bench.rubric([{"id": "other", "value": "It is nice."}], name="old.yaml")
        ran = bench("filter", "--against", old, "--json")
        assert ran.code == EXIT_UNAVAILABLE and "no answer could be read" in ran.json["error"]
        # For each of the two rubrics.
        assert judge.calls <= 2 * ATTEMPTS * (MOST + 2)


async def test_a_task_that_is_never_decided_is_a_dead_letter_with_the_answers(store: Store, tmp_path: Path) -> None:
    await tell(store, 1)
    with JudgeServer(behaviour=PROSE) as judge:
        settings = config(tmp_path, judge, retry_undecided_seconds=0, max_thread=1)

        async def run() -> dict[str, int]:
            judging = TaskJudging(store, settings)
            report = await judging.run()
            judging.grader.close()
            return {"dead": report.dead, "calls": report.calls}

        total = {"dead": 0, "calls": 0}
        for _ in range(5):
            for name, number in (await run()).items():
                total[name] += number
        assert total == {"dead": 1, "calls": judge.calls} and judge.calls == 3 * ATTEMPTS
        assert await states(store) == {"dead": 1}
        [letter] = await store.read(dead_letters.in_states, [DeadLetterState.OPEN])
        assert "the judge gave no verdict in 3 attempts" in letter.error
        assert letter.excerpt == "\n".join(["result: GOOD"] * 3)
        assert (await store.read(balance)).balanced
        [row] = await store.read(lambda conn: conn.execute(select(schema.verdicts)).all())
        assert [each["attempt"] for each in row.judgements] == [1, 2, 3] and row.calls == judge.calls
        # A person who retries it has it asked about once more; a verdict is kept without the attempts.
        await store.write(dead_letters.retry)
        await run()
        assert await states(store) == {"dead": 1}
        await store.write(dead_letters.retry)
        judge.behave("good")
        await run()
        [row] = await store.read(lambda conn: conn.execute(select(schema.verdicts)).all())
        assert row.outcome in ("accepted", "rejected") and len(row.judgements) == 1


async def test_an_unreachable_judge_makes_no_dead_letters(store: Store, tmp_path: Path) -> None:
    await tell(store, 2)
    with JudgeServer(behaviour="500") as judge:
        settings = config(tmp_path, judge, max_attempts=1, retry_undecided_seconds=0, max_task_attempts=1)
        for _ in range(4):
            judging = TaskJudging(store, settings)
            error = (await judging.run()).error
            judging.grader.close()
            assert isinstance(error, JudgeError) and error.exit_code == EXIT_UNAVAILABLE
    assert set(await states(store)) <= {"pending", "undecided"}


@pytest.mark.slow
async def test_the_daemon_pauses_says_so_and_goes_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.daemon.service.RETRY_SECONDS", 0.05)
    await tell(store, 40)
    with JudgeServer(behaviour=PROSE) as judge:
        settings = config(tmp_path, judge, retry_undecided_seconds=3600, max_unreadable=4, daemon={"metrics": None})
        service = Service(settings.model_copy(update={"sources": []}), store)
        looks: list[int] = []
        run = service._filtering.run

        async def counted(**values: Any) -> Any:
            looks.append(judge.calls)
            return await run(**values)

        service._filtering.run = counted
        running = asyncio.create_task(service.run())

        async def is_paused() -> bool:
            return "no answer could be read" in await store.read(database.noted, database.JUDGE_NOTE)

        async def has_recovered() -> bool:
            return not (await store.read(database.noted, database.JUDGE_NOTE) or (await states(store))["pending"])

        try:
            await until(is_paused, "the pause")
            await until(lambda: service._stages["judge"].task is None, "the end of the pass")
            asked = judge.calls
            looks.clear()
            for _ in range(10):
                service._stages["judge"].wake()
                assert service._stages["judge"].task is None
            assert looks == []
            assert judge.calls == asked and not running.done()
            assert await is_paused()
            judge.behave("good")
            service._stages["judge"].retry_now()
            await until(has_recovered, "all verdicts")
        finally:
            service.stop()
            await running


@pytest.mark.training
def test_a_round_fails_instead_of_paying_for_every_rollout(tmp_path: Path) -> None:
    from flywheel.training.optim.rollout_grading import Grading, PauseLimits

    with JudgeServer(behaviour=PROSE) as judge:
        settings = JudgeSettings(model="m", base_url=judge.base_url, max_unreadable=3)
        grader = Grader(parse_rubric(RUBRIC, "r"), settings)
        grading = Grading(grader, settings.budget, tmp_path, Purpose.ROUNDS, PauseLimits(1.0, lambda _: None))
        for _ in range(3):
            assert grading(Exchange("1+1?", "2")).error
        asked = judge.calls
        with pytest.raises(JudgeError, match="no answer could be read") as caught:
            grading(Exchange("1+1?", "2"))
        grader.close()
    assert not caught.value.retryable and judge.calls == asked
