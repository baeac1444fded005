"""Filtering with everything real but the models: chains, the store across restarts, an embedding server, a judge."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from sqlalchemy import Connection, select

from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.judging.judging import TaskJudging
from flywheel.daemon.rounds import planner
from flywheel.daemon.service import Service
from flywheel.judge.filters.pii import Pii, Redactor
from flywheel.judge.usage import BudgetSpentError, today
from flywheel.records.states import Split, TaskState
from flywheel.records.verdict import Outcome, Verdict
from flywheel.store import claims, deduplication, judge_usage, stages
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.store.views import lineage
from flywheel.store.views.balance import balance
from tests.daemon.filter_bench import (
    DEDUPLICATION,
    INFLUENCE,
    RUBRIC,
    WORDY,
    Make,
    burst,
    by_model,
    questions,
    run,
    states,
    tell,
)
from tests.factories.embedding_server import EmbeddingServer
from tests.factories.judge_server import JudgeServer
from tests.factories.round import planned_round
from tests.factories.state import copied_state, open_state
from tests.factories.time_limit import runs_out_when
from tests.factories.trace import put_replies, replies_on, reply
from tests.waiting import until


async def test_what_repeats_is_rejected_unpaid_and_told_what_it_repeats(
    store: Store, make: Make, judge: JudgeServer
) -> None:
    near = WORDY.format(3)
    await tell(store, *questions(near, near.upper() + "!", f"Please: {near}", WORDY.format(4), "Something else"))
    report, seen = await run(store, make(DEDUPLICATION))
    assert await states(store) == ["accepted", "rejected", "rejected", "accepted", "accepted"]
    assert judge.calls == 3 == report.calls
    exact, words = (each for each in seen.values() if each.repeats)
    assert {exact.repeats and exact.repeats.method, words.repeats and words.repeats.method} == {"exact", "words"}
    story = await store.read(lineage.why, exact.task.key)
    told = story["replies"][0]["task"]
    assert told["repeats"]["task_id"] == next(
        each.task.key for each in seen.values() if each.task.line["main_query"] == near
    )
    assert told["repeats"]["similarity"] == exact.repeats.similarity
    assert told["repeats"]["task_id"] in told["verdicts"][0]["reason"]
    assert (await store.read(balance)).problems == []


async def test_what_is_due_again_when_its_original_is_rejected_is_judged_in_the_same_run(
    store: Store, make: Make, judge: JudgeServer
) -> None:
    first, second, other = questions(WORDY.format(3), WORDY.format(3) + "!", WORDY.format(4), answer="WRONG")
    await tell(store, first, replace(second, answer="right"), other)
    report, seen = await run(store, make(DEDUPLICATION))
    assert await states(store) == ["rejected", "accepted", "rejected"]
    assert judge.calls == report.calls == 3
    assert report.judged == 4
    assert seen[second.span_id].repeats is None


async def test_a_limit_holds_for_what_is_due_again_too(store: Store, make: Make, judge: JudgeServer) -> None:
    await tell(store, *questions(WORDY.format(3), WORDY.format(3) + "!", answer="WRONG"))
    report = await TaskJudging(store, make(DEDUPLICATION)).run(limit=2)
    assert report.judged == 2
    assert await states(store) == ["rejected", "pending"]
    assert judge.calls == 1


async def test_earlier_rounds_count_after_a_restart_and_before_the_chain_had_the_filter(
    tmp_path: Path, store: Store, make: Make, judge: JudgeServer
) -> None:
    old, later, again = questions(WORDY.format(3), WORDY.format(3) + " .", "please " + WORDY.format(3))
    await tell(store, old)
    await run(store, make())

    def consume(conn: Connection) -> None:
        number = conn.execute(select(schema.tasks.c.id)).scalar_one()
        move(conn, number, TaskState.ACCEPTED, TaskState.RESERVED)
        move(conn, number, TaskState.RESERVED, TaskState.CONSUMED)

    await store.write(consume)
    await tell(store, later)
    await run(store, make(DEDUPLICATION))
    async with open_state(tmp_path / "state") as reopened:
        await tell(reopened, again)
        await run(reopened, make(DEDUPLICATION))
        assert await states(reopened) == ["consumed", "rejected", "rejected"]
    assert judge.calls == 1


async def test_another_threshold_compares_with_earlier_tasks_too(store: Store, make: Make) -> None:
    first, second = questions("one two three four five six", "one two three four five seven")
    await tell(store, first)
    await run(store, make({"type": "deduplication", "params": {"similarity_threshold": 0.95}}))
    await tell(store, second)
    await run(store, make({"type": "deduplication", "params": {"similarity_threshold": 0.7}}))
    assert await states(store) == ["accepted", "rejected"]


async def test_the_sides_and_other_conversations_before_are_not_compared(store: Store, make: Make) -> None:
    (trained,) = questions(WORDY.format(3))
    (held_out,) = questions(WORDY.format(3), side=Split.HELD_OUT)
    await tell(store, trained)
    await run(store, make(DEDUPLICATION))

    def other_side(conn: Connection) -> None:
        # Ingestion puts conversations that begin alike on one side: here they are on both.
        row = conn.execute(select(schema.tasks).order_by(schema.tasks.c.id.desc()).limit(1)).one()
        line = {**row.payload, "metadata": {**row.payload["metadata"], "split": "held-out"}}
        conn.execute(schema.tasks.update().where(schema.tasks.c.id == row.id).values(payload=line, split="held-out"))

    await tell(store, held_out)
    await store.write(other_side)
    before = tuple({"role": role, "content": "Something was said."} for role in ("user", "assistant"))
    number = 900
    for query in ("Go on.", "Go on."):
        number += 1
        said = ({"role": "user", "content": f"about {number}"}, *before)
        await tell(store, reply(number, query=query, history=said, conversation_id=trained.conversation_id, turn=1))
    await run(store, make(DEDUPLICATION))
    assert await states(store) == ["accepted"] * 4


async def test_what_the_judge_rejects_stands_in_nobodys_way(store: Store, make: Make, judge: JudgeServer) -> None:
    one, two, three = replies_on(Split.TRAIN, 3, query=WORDY.format(3))
    await tell(store, reply(900, query=one.query, conversation_id=one.conversation_id, answer="WRONG"), two, three)
    config = make(DEDUPLICATION, judge={"base_url": judge.base_url, "model": "j", "max_thread": 1})
    await run(store, config)
    await run(store, config)
    assert await states(store) == ["rejected", "accepted", "rejected"]
    assert judge.calls == 2
    assert (await store.read(balance)).problems == []


@pytest.mark.parametrize("by_words", [True, False])
async def test_other_names_part_questions_that_are_else_the_same(
    store: Store, make: Make, embeddings: EmbeddingServer, by_words: bool
) -> None:
    asked = "Could you please tell me in one short sentence what the capital city of {} is called today"
    capitals = [asked.format(name) for name in ("France", "Spain", "France now")]
    await tell(store, *questions(*capitals, capitals[1].lower()))
    await run(store, make(DEDUPLICATION if by_words else by_model(embeddings)))
    assert await states(store) == ["accepted", "accepted", "rejected", "rejected"]


async def test_each_question_is_embedded_once_for_ever(
    tmp_path: Path, store: Store, make: Make, embeddings: EmbeddingServer, judge: JudgeServer
) -> None:
    told = questions("alpha beta gamma", "gamma alpha beta", "delta epsilon", "zeta eta", "alpha beta gamma")
    await tell(store, *told[:3])
    await run(store, make(by_model(embeddings)))
    assert await states(store) == ["accepted", "rejected", "accepted"]
    assert sorted(embeddings.texts) == sorted(each.query for each in told[:3])
    assert len(embeddings.requests) == 1
    async with open_state(tmp_path / "state") as reopened:
        await tell(reopened, *told[3:])
        await run(reopened, make(by_model(embeddings)))
        assert (await states(reopened))[3:] == ["accepted", "rejected"]
    assert sorted(embeddings.texts) == sorted(each.query for each in told[:4])
    assert judge.calls == 3


async def test_numbers_part_questions_that_a_model_finds_alike(
    store: Store, make: Make, embeddings: EmbeddingServer
) -> None:
    embeddings.embed = lambda text: [1.0, 0.01 * len(text)]
    await tell(store, *questions("What is 90% of 160?", "What is 90% of 140?", "What is, tell me, 90% of 140?"))
    await run(store, make(by_model(embeddings)))
    assert await states(store) == ["accepted", "accepted", "rejected"]


async def test_a_question_that_cannot_be_embedded_is_compared_by_its_words(
    store: Store, make: Make, embeddings: EmbeddingServer
) -> None:
    embeddings.refused = dict.fromkeys((WORDY.format(3), f"please {WORDY.format(3)}"), 400)
    await tell(store, *questions(WORDY.format(3), f"please {WORDY.format(3)}", "fine"))
    await run(store, make(by_model(embeddings)))
    assert await states(store) == ["accepted", "rejected", "accepted"]
    asked = len(embeddings.texts)
    await tell(store, reply(990, query="fine"))
    await run(store, make(by_model(embeddings)))
    assert len(embeddings.texts) == asked


async def test_tasks_that_were_accepted_before_are_embedded_when_a_model_comes(
    store: Store, make: Make, embeddings: EmbeddingServer
) -> None:
    first, second = questions("alpha beta gamma", "gamma beta alpha")
    await tell(store, first)
    await run(store, make())
    await tell(store, second)
    await run(store, make(by_model(embeddings)))
    assert await states(store) == ["accepted", "rejected"]
    assert sorted(embeddings.texts) == ["alpha beta gamma", "gamma beta alpha"]


@pytest.mark.slow
async def test_a_filter_that_raises_costs_its_own_task(tmp_path: Path, store: Store, make: Make) -> None:
    (tmp_path / "mine.py").write_text("def keep(task):\n    return 'bad' not in task['main_query'] or 1 / 0\n")
    await tell(store, *questions("good one", "bad one", "another one"))
    report, _ = await run(store, make({"type": "python", "params": {"path": "mine.py"}}))
    assert await states(store) == ["accepted", "dead", "accepted"]
    assert report.dead == 1


async def test_the_judge_and_the_store_see_no_personal_data(store: Store, make: Make, judge: JudgeServer) -> None:
    await tell(store, *questions("I am bob@example.com", answer="Hello bob@example.com"))
    await run(store, make({"type": "pii"}))
    assert judge.calls == 1
    assert "bob@example.com" not in str(judge.requests)
    assert "[EMAIL_1]" in str(judge.requests)
    lines = await store.read(lambda c: c.execute(select(schema.tasks.c.payload)).scalars().all())
    assert "bob@example.com" not in str(lines)


async def test_a_task_with_a_secret_is_rejected_unpaid(store: Store, make: Make, judge: JudgeServer) -> None:
    await tell(store, *questions("My key is AKIAIOSFODNN7EXAMPLE", "fine"))
    _, seen = await run(store, make({"type": "pii", "params": {"action": "reject"}}))
    assert await states(store) == ["rejected", "accepted"]
    assert judge.calls == 1
    assert any(j.verdict and "it holds an API key" in j.verdict.reason for j in seen.values())


async def test_filters_behind_the_judge_stop_what_it_accepted_and_its_verdict_stays_paid(
    store: Store, make: Make, judge: JudgeServer
) -> None:
    config = make(
        {"type": "llm_evaluate"},
        {"type": "rules", "params": {"min_answer_length": 10}},
        DEDUPLICATION,
        keep_order=True,
        judge={"base_url": judge.base_url, "model": "j", "max_thread": 1},
    )
    await tell(store, *questions(*[WORDY.format(3)] * 2, answer="long enough, that one"), reply(999, answer="short"))
    report, seen = await run(store, config)
    assert await states(store) == ["accepted", "rejected", "rejected"]
    assert judge.calls == 3 == report.calls
    assert seen[f"span{999:012d}"].paid is not None

    def put_back(conn: Connection) -> None:
        move(conn, 3, TaskState.REJECTED, TaskState.PENDING)

    await store.write(put_back)
    report, _ = await run(store, config)
    assert (await states(store))[2] == "rejected"
    assert judge.calls == 3
    assert report.calls == 0


async def test_agentjets_text_is_the_rubric_and_its_parameters_reach_the_judge(
    store: Store, make: Make, judge: JudgeServer, caplog: pytest.LogCaptureFixture
) -> None:
    params = {"custom_rubrics": "1. Drop what is wrong.", "max_tokens": 77, "max_thread": 3, "print_reason": True}
    config = make({"type": "llm_evaluate", "params": params})
    await tell(store, *questions("fine"))
    with caplog.at_level(logging.INFO, logger="flywheel"):
        await run(store, config)
    (request,) = judge.requests
    assert "Drop what is wrong." in str(request["messages"])
    assert request["temperature"] == 0.5
    assert 77 in (request.get("max_tokens"), request.get("max_completion_tokens"))
    assert [each.id for each in rubric_of(config).every][-2:] == ["same_language", "custom_rubrics"]
    assert "filter.rubric is not used" in caplog.text
    assert "accepted: " in caplog.text


async def test_a_burst_waits_for_a_person_also_what_had_been_accepted_before(
    store: Store, make: Make, judge: JudgeServer
) -> None:
    config = make(INFLUENCE)
    told = burst(8)
    await tell(store, *told[:3], *questions("something else"))
    await run(store, config)
    assert await states(store) == ["accepted"] * 4
    await tell(store, *told[3:])
    report, seen = await run(store, config)
    assert await states(store) == ["held"] * 3 + ["accepted"] + ["held"] * 5
    assert report.held == 5
    assert all(each.held for each in seen.values())
    assert judge.calls == 4
    books = await store.read(balance)
    assert books.balanced
    assert books.ends["pending"] == 8
    released = await store.write(claims.release_held, [1, 5])
    assert released == [1, 5]
    rejected = await store.write(claims.reject_held, [6])
    assert rejected == [6]
    await run(store, config)
    assert await states(store) == ["accepted", "held", "held", "accepted", "accepted", "rejected"] + ["held"] * 3
    # The one that had been judged before was not paid for again.
    assert judge.calls == 5
    assert (await store.read(balance)).problems == []


async def test_slow_repetition_and_other_origins_are_no_burst(store: Store, make: Make) -> None:
    config = make(INFLUENCE)
    await tell(store, *burst(8, seconds=50))
    await store.write(put_replies, *burst(4, first=500), source="/b")
    await run(store, config)
    assert set(await states(store)) == {"accepted"}


@pytest.mark.slow
async def test_shares_hold_a_round_back_and_what_is_above_them_waits(store: Store, make: Make) -> None:
    params = {"conversation": 0.25, "template": 1, "user": 1, "burst": None, "widen": False}
    trigger = {"min_samples": 4, "max_samples": 8}
    config = make({"type": "influence", "params": params}, trigger=trigger, gate={"min_tasks": 1, "min_power": 0})
    (one, *rest) = replies_on(Split.TRAIN, 9)
    same = [reply(100 + n, conversation_id=one.conversation_id, turn=n) for n in range(6)]
    await tell(store, *same, *rest[:2], *replies_on(Split.HELD_OUT, 1, span_id="f" * 16))
    await run(store, config)
    held_back = await store.read(planner.due, config)
    assert not held_back.start
    assert held_back.reason.startswith("3 of 4 samples are free; 5 over their share")
    await tell(store, *rest[2:])
    await run(store, config)
    assert (await store.read(planner.due, config)).start
    assert len((await planned_round(store, config)).train) == 8
    after = await states(store)
    assert after.count("reserved") == 8
    assert after[:6].count("reserved") == 2
    assert after.count("accepted") == 7


async def test_a_dry_run_of_a_chain_leaves_no_trace(tmp_path: Path, store: Store, make: Make) -> None:
    await tell(store, *questions("a b", "a  b"))
    async with copied_state(tmp_path / "state") as copied:
        report, _ = await run(copied, make(INFLUENCE, DEDUPLICATION))
        assert (report.accepted, report.rejected) == (1, 1)
    assert await states(store) == ["pending", "pending"]
    assert await store.read(lambda c: c.execute(select(deduplication.duplicates)).all()) == []


async def test_a_task_that_breaks_the_grading_is_a_dead_letter_and_stops_no_other(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tell(store, *questions("poison", "Good one", "Good two"))
    config = make()
    filtering = TaskJudging(store, config)
    begin = filtering.grader.begin

    def breaks(exchange: Any, *given: Any) -> Any:
        if exchange.query == "poison":
            raise AttributeError("odd")
        return begin(exchange, *given)

    monkeypatch.setattr(filtering.grader, "begin", breaks)
    report = await filtering.run()
    assert (report.accepted, report.dead, report.error) == (2, 1, None)
    assert await states(store) == ["dead", "accepted", "accepted"]
    errors = select(schema.dead_letters.c.error)
    assert "AttributeError: odd" in await store.read(lambda conn: conn.execute(errors).scalar_one())
    assert (await store.read(balance)).balanced


HANGS = """
from pathlib import Path

def keep(task):
    if "hang" in task["main_query"]:
        with Path(__file__).with_name("hung").open("a") as log:
            log.write("again\\n")
        while True:
            pass
    return True
"""


def times_hung(folder: Path) -> int:
    log = folder / "hung"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.slow
async def test_a_filter_that_hangs_costs_its_own_task(
    tmp_path: Path, store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_out_when(monkeypatch, lambda: times_hung(tmp_path))
    (tmp_path / "mine.py").write_text(HANGS)
    await tell(store, *questions("one", "hang", "two", "hang again", "three"))
    config = make({"type": "python", "params": {"path": "mine.py", "timeout_seconds": 0.5}})
    report, seen = await run(store, config)
    assert (report.accepted, report.dead, report.error) == (3, 2, None)
    assert await states(store) == ["accepted", "dead", "accepted", "dead", "accepted"]
    assert all("ran longer than 0.5 s" in each.error for each in seen.values() if each.error)


@pytest.mark.slow
async def test_a_filter_whose_file_does_not_load_again_costs_no_task(
    tmp_path: Path, store: Store, make: Make
) -> None:
    once = tmp_path / "once"
    text = f"import pathlib\npathlib.Path({str(once)!r}).touch(exist_ok=False)\nimport os\n"
    (tmp_path / "mine.py").write_text(f"{text}def keep(task):\n    os._exit(1)\n")
    await tell(store, *questions("one", "two", "three"))
    report, _ = await run(store, make({"type": "python", "params": {"path": "mine.py"}}))
    assert "FileExistsError" in str(report.error)
    assert await states(store) == ["pending"] * 3
    once.unlink()


@pytest.mark.slow
async def test_a_criterion_that_hangs_leaves_its_task_undecided(
    tmp_path: Path, store: Store, make: Make, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task at a time: when the limit of the one that hangs runs out, so does that of any other call."""
    monkeypatch.setattr("flywheel.judge.rubric.checks.python_check.TIMEOUT_SECONDS", 0.5)
    runs_out_when(monkeypatch, lambda: times_hung(tmp_path))
    config = make(judge={"base_url": judge.base_url, "model": "j", "max_thread": 1})
    (tmp_path / "mine.py").write_text(HANGS)
    criteria = [*RUBRIC["criteria"], {"id": "ours", "type": "python", "value": "mine.py:keep"}]  # type: ignore[misc]
    (tmp_path / "rubric.yaml").write_text(yaml.safe_dump({"id": "r", "criteria": criteria}))
    await tell(store, *questions("one", "hang", "two"))
    report, _ = await run(store, config)
    assert (report.accepted, report.undecided, report.error) == (2, 1, None)


async def test_what_others_spend_beside_the_daemon_counts_in_its_budget(
    store: Store, make: Make, judge: JudgeServer
) -> None:
    settings = {"base_url": judge.base_url, "model": "j", "budget": {"tokens_per_day": 1000}}
    filtering = TaskJudging(store, make(judge=settings))
    await tell(store, *questions("one"))
    assert (await filtering.run()).accepted == 1
    await store.write(judge_usage.book_verdict, Verdict(Outcome.ACCEPTED, 1.0, calls=1, prompt_tokens=900))
    await tell(store, *questions("x", "two")[1:])
    report = await filtering.run()
    assert "the budget of 1,000 tokens a day is spent (1,020 were used)" in str(report.error)
    assert judge.calls == 1


async def test_the_daemon_looks_again_at_what_a_spent_budget_leaves_on_the_next_day(
    store: Store, make: Make, judge: JudgeServer
) -> None:
    settings = {"base_url": judge.base_url, "model": "j", "max_thread": 1, "budget": {"tokens_per_day": 10}}
    service = Service(make(judge=settings), store)
    await tell(store, *questions("one", "two"))
    with pytest.raises(BudgetSpentError) as caught:
        await service._do_judge()
    assert await states(store) == ["accepted", "pending"]
    midnight = datetime.fromisoformat(today()).replace(tzinfo=UTC) + timedelta(days=1)
    await service._stages["judge"].attempt()
    record = (await store.read(stages.records))["judge"]
    assert caught.value.retry_after <= timedelta(days=1).total_seconds()
    assert abs(datetime.fromisoformat(record.waits_until) - midnight) < timedelta(minutes=10)


SLOW = """
import time
from pathlib import Path

def keep(task):
    folder = Path(__file__).parent
    with (folder / "log").open("a") as log:
        log.write(task["main_query"] + "\\n")
    while not (folder / "go").exists():
        time.sleep(0.01)
    return True
"""


async def test_a_stop_waits_for_the_task_that_a_filter_looks_at_and_for_no_other(
    tmp_path: Path, store: Store, make: Make, judge: JudgeServer
) -> None:
    (tmp_path / "mine.py").write_text(SLOW)
    await tell(store, *questions("one", "two", "three"))
    stop = threading.Event()
    filtering = TaskJudging(store, make({"type": "python", "params": {"path": "mine.py"}}))
    running = asyncio.create_task(filtering.run(stop=stop))
    await until((tmp_path / "log").exists, "the filter to look at the first task")
    stop.set()
    (tmp_path / "go").touch()
    report = await running
    assert (report.judged, report.error) == (0, None)
    assert (tmp_path / "log").read_text() == "one\n"
    assert await states(store) == ["pending"] * 3
    assert judge.calls == 0


async def test_a_task_that_cannot_be_redacted_is_shown_to_no_judge_and_stops_no_other(
    store: Store, make: Make, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def redactor(_: Pii) -> Redactor:
        def redact(line: dict[str, Any]) -> dict[str, Any]:
            if line["main_query"] == "poison":
                raise RecursionError("too deep")
            return line

        return redact

    monkeypatch.setattr(Pii, "redactor", redactor)
    await tell(store, *questions("one", "poison", "two"))
    report, _ = await run(store, make({"type": "pii"}, DEDUPLICATION))
    assert (report.accepted, report.dead, report.error) == (2, 1, None)
    assert await states(store) == ["accepted", "dead", "accepted"]
    assert "poison" not in str(judge.requests)
