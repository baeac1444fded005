"""What a round's judge takes is booked once, whoever dies when, shown, and held within the budget."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.status import facts_of
from flywheel.config.file import Config
from flywheel.config.notices import NoticeType
from flywheel.daemon.rounds.round_usage import RoundUsage
from flywheel.daemon.service import Service
from flywheel.daemon.status import as_json, snapshot
from flywheel.errors import TrainError
from flywheel.judge.usage import Allowance, Budget, Purpose, UsageFile, Used, today
from flywheel.records.states import RoundState
from flywheel.records.verdict import Outcome, Verdict
from flywheel.store import judge_usage, notices, rounds
from flywheel.store.kernel import schema
from tests.daemon.rounds.workers import REFUSES, works
from tests.factories.config import JUDGE, with_settings
from tests.factories.verdict import put_more_tasks
from tests.factories.wheel import Wheel
from tests.waiting import until


@pytest.fixture
async def wheel(wheel: Wheel) -> Wheel:
    """Of which nothing is booked yet."""
    await wheel.store.write(lambda conn: conn.execute(schema.judge_days.delete()))
    return wheel


def used(tokens: int, purpose: Purpose = Purpose.ROUNDS) -> Used:
    return Used(today(), purpose, 1, tokens, 0)


def line(tokens: int) -> str:
    return (
        f'{{"day": "{today()}", "purpose": "rounds", "calls": 1, "prompt_tokens": {tokens}, "completion_tokens": 0}}'
    )


def with_judge(wheel: Wheel, **settings: Any) -> Config:
    return wheel.config.model_copy(update={"judge": Config.model_validate({"judge": {**JUDGE, **settings}}).judge})


async def test_what_the_worker_used_is_booked_while_it_runs_and_each_call_once(wheel: Wheel) -> None:
    directory = await wheel.started()
    row = await wheel.store.read(rounds.live)
    assert row is not None
    file = UsageFile(directory)

    def daemon() -> RoundUsage:
        judge = wheel.config.judge
        return RoundUsage(wheel.store, Budget(judge.budget), judge, row.id, directory)

    first = daemon()
    await first.settle()
    for number in range(3):
        file.append(used(100))
        await first.settle()
        await first.settle()
        assert await wheel.store.read(judge_usage.tokens_today) == 100 * (number + 1)
    file.append(used(50, Purpose.GATES))
    # The next daemon goes on where the one that was killed had come.
    second = daemon()
    await second.settle()
    await second.settle()
    found = await wheel.store.read(judge_usage.usage_by_purpose)
    assert found[Purpose.ROUNDS] == (3, 300, 0)
    assert found[Purpose.GATES] == (1, 50, 0)


@pytest.mark.slow
async def test_calls_of_a_worker_that_is_killed_are_booked_and_so_are_those_of_the_next_attempt(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works(tmp_path, monkeypatch, f"echo '{line(700)}' >> $3/usage.jsonl; kill -9 $$")
    going = wheel.others(with_settings(wheel.config, daemon={"round_attempts": 2}))
    await going.plan("test")
    assert await going.finish_live() is RoundState.FAILED
    row = await wheel.row()
    assert "SIGKILL" in row.reason
    found = await wheel.store.read(judge_usage.usage_by_purpose)
    assert found[Purpose.ROUNDS] == (2, 1400, 0)


async def test_status_tells_filter_rounds_and_gates_apart_and_together_with_money(wheel: Wheel) -> None:
    config = with_judge(wheel, prices={"input_per_million": 2, "output_per_million": 10})
    for purpose, tokens in ((Purpose.ROUNDS, 3_000_000), (Purpose.GATES, 500_000), (Purpose.CALIBRATION, 0)):
        await wheel.store.write(judge_usage.book, [Used("2026-01-01", purpose, 3, tokens, tokens // 10)])
    await wheel.store.write(judge_usage.book_verdict, Verdict(Outcome.ACCEPTED, 1.0, calls=1, prompt_tokens=900))
    state = await wheel.store.read(snapshot, config)
    judge = as_json(state)["judge"]
    assert judge["usage"] == {
        "calls": 10, "prompt_tokens": 3_500_900, "completion_tokens": 350_000,
        "cost": {"amount": 10.5018, "currency": "USD"},
    }  # fmt: skip
    assert judge["by_purpose"]["rounds"] == {
        "calls": 3, "prompt_tokens": 3_000_000, "completion_tokens": 300_000,
        "cost": {"amount": 9.0, "currency": "USD"},
    }  # fmt: skip
    assert judge["tokens_today"] == 900
    shown = dict(facts_of(state))["judge"]
    assert shown.startswith("10 calls; 3,500,900 tokens sent, 350,000 received; about 10.50 USD\n")
    assert "filter 1 call, 900 tokens, about 0.0018 USD; rounds 3 calls, 3,300,000 tokens, about 9.00 USD; " in shown
    assert "gates 3 calls, 550,000 tokens, about 1.50 USD; calibration 3 calls, 0 tokens" in shown


async def test_the_worker_is_lent_what_all_others_leave(wheel: Wheel) -> None:
    directory = await wheel.started()
    row = await wheel.store.read(rounds.live)
    assert row is not None
    judge = with_judge(wheel, budget={"tokens_per_day": 1000, "tokens_per_run": 5000}).judge
    budget = Budget(judge.budget)
    account = RoundUsage(wheel.store, budget, judge, row.id, directory)

    async def lent() -> Allowance:
        await account.settle()
        allowance = Allowance.read(directory)
        assert allowance is not None
        return allowance

    assert (await lent()).tokens == 1000
    UsageFile(directory).append(used(300))
    assert (await lent()).tokens == 1000, "what it has used itself is in it"
    await wheel.store.write(judge_usage.book_verdict, Verdict(Outcome.ACCEPTED, 1.0, calls=1, prompt_tokens=400))
    assert (await lent()).tokens == 600, "the filter uses of the same"
    assert budget.run_left() == 5000 - 300
    budget.book(4600)
    last = await lent()
    assert (last.tokens, last.why) == (
        400,
        "judge.budget.tokens_per_run (5,000) is spent; judging resumes with the next run",
    )
    # Another daemon is another run.
    again = RoundUsage(wheel.store, Budget(judge.budget), judge, row.id, directory)
    await again.settle()
    assert Allowance.read(directory) == Allowance(
        600, "judge.budget.tokens_per_day (1,000) is spent; judging resumes at midnight UTC"
    )


async def test_what_a_round_uses_is_gone_for_the_filter(wheel: Wheel) -> None:
    limits = Config.model_validate({"judge": {"budget": {"tokens_per_day": 1000}}}).judge.budget
    filtering = Budget(limits, spent_today=lambda: 100)
    assert filtering.left() == 900
    filtering.book(250)
    assert filtering.left() == 650


@pytest.mark.slow
async def test_filter_and_rounds_of_a_daemon_have_one_budget(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works(tmp_path, monkeypatch, f"echo '{line(300)}' >> $3/usage.jsonl; {REFUSES}")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    service = Service(with_judge(wheel, budget={"tokens_per_run": 1000}), wheel.store)
    assert await service._rounds.start_due()
    assert await service._rounds.finish_live() is RoundState.REJECTED
    assert service._filtering.budget.run_left() == 700


@pytest.mark.parametrize("limit", ["tokens_per_day", "tokens_per_run"])
async def test_no_round_starts_when_the_budget_is_spent(wheel: Wheel, limit: str) -> None:
    config = with_judge(wheel, budget={limit: 100})
    going = wheel.others(config)
    await wheel.store.write(judge_usage.book_verdict, Verdict(Outcome.ACCEPTED, 1.0, calls=1, prompt_tokens=100))
    going._budget.book(100)
    assert not await going.start_due()
    state = await wheel.store.read(snapshot, config)
    assert state["waiting_for"].startswith(f"judge.budget.{limit} (100) is spent; judging resumes ")
    with pytest.raises(TrainError, match=limit):
        await going.plan("by hand")


@pytest.mark.slow
async def test_a_round_that_needs_more_than_this_run_may_use_fails_and_is_stopped(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = '{"phase": "training", "paused": "judge.budget.tokens_per_run is spent"}'
    works(
        tmp_path,
        monkeypatch,
        f"echo $$ > {tmp_path}/pid; echo '{line(100)}' >> $3/usage.jsonl; echo '{paused}' > $3/progress.json;"
        " exec sleep 600",
    )
    going = wheel.others(with_judge(wheel, budget={"tokens_per_run": 100}))
    await going.plan("test")
    assert await going.finish_live() is RoundState.FAILED
    row = await wheel.row()
    assert "judge.budget.tokens_per_run (100) is spent" in row.reason
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert (await wheel.books())["accepted"] == 6 + 2
    assert await wheel.store.read(judge_usage.tokens_today) == 100


@pytest.mark.slow
async def test_a_round_that_waits_for_midnight_is_left_to_wait(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are paid for: to stop it would throw them away."""
    paused = '{"phase": "training", "paused": "judge.budget.tokens_per_day is spent"}'
    works(
        tmp_path,
        monkeypatch,
        f"echo '{line(100)}' >> $3/usage.jsonl; echo '{paused}' > $3/progress.json;"
        f" while [ ! -e {tmp_path}/go_on ]; do sleep 0.05; done; cp $3/allowance.json {tmp_path}; {REFUSES}",
    )
    going = wheel.others(with_judge(wheel, budget={"tokens_per_day": 100}))
    await going.plan("test")
    spent = Allowance(100, "judge.budget.tokens_per_day (100) is spent; judging resumes at midnight UTC")
    directory = wheel.config.state_dir / "rounds" / (await wheel.row()).name

    async def told_of() -> list[Any]:
        return (await wheel.store.read(notices.after, 0, frozenset({NoticeType.BUDGET_SPENT}), 1000))[0]

    async def is_told() -> bool:
        return Allowance.read(directory) == spent and bool(await told_of())

    finishing = asyncio.create_task(going.finish_live())
    await until(is_told, "the daemon's word to the worker, and to the operator")
    (tmp_path / "go_on").touch()
    assert await finishing is RoundState.REJECTED
    assert Allowance.read(tmp_path) == spent
    told = await told_of()
    assert [(each.subject, each.text) for each in told] == [
        ("r0001", "r0001 is paused: judge.budget.tokens_per_day is spent")
    ]
    await wheel.store.write(put_more_tasks, 6)
    assert not await going.start_due()
