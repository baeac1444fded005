"""A dry run decides as the run that follows it, for every filter and every type of criterion, and costs the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import Connection, select

from flywheel.config.file import Config
from flywheel.daemon.judging.comparison import Comparison
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.judging.judging import TaskJudging
from flywheel.daemon.judging.judging_report import CostEstimator, JudgingEstimate, JudgingReport, TaskResult
from flywheel.daemon.rounds import planner
from flywheel.judge.grader import CallEstimate
from flywheel.judge.rubric.file import load_rubric
from flywheel.judge.rubric.rubric import KINDS, Rubric
from flywheel.records.states import Split, TaskState
from flywheel.store.kernel import schema
from flywheel.store.kernel.bulk import count_rows
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from tests.daemon.filter_bench import WORDY, Make, burst, by_model, questions, run, states, tell
from tests.factories.embedding_server import EmbeddingServer
from tests.factories.judge_server import JudgeServer
from tests.factories.state import copied_state
from tests.factories.trace import replies_on, reply

EVERY: list[dict[str, Any]] = [
    {"id": "correct", "value": "The answer is right.", "weight": 10, "required": True},
    {"id": "polite", "value": "It is polite.", "choices": ["rude", "fair", "kind"], "weight": 2},
    {"id": "leaks", "value": "It leaks.", "weight": -3},
    {"id": "boxed", "type": "regex", "value": "boxed"},
    {"id": "excuse", "type": "not-regex", "value": "(?i)rate limit"},
    {"id": "greets", "type": "contains", "value": "Hello"},
    {"id": "long", "type": "min-length", "value": 5, "required": True},
    {"id": "short", "type": "max-length", "value": 400},
    {"id": "language", "type": "language", "value": "query"},
    {"id": "json", "type": "json-schema", "value": {"type": "object"}},
    {"id": "seven", "type": "math-equal", "value": 7},
    {"id": "searched", "type": "tool-called", "value": "search"},
    {"id": "order", "type": "tool-sequence", "value": ["search", "read"]},
    {"id": "unfailing", "type": "no-error-span"},
    {"id": "repeated", "type": "redundant-call", "weight": -0.2},
    {"id": "efficient", "type": "step-efficiency", "weight": 0.1},
    {"id": "formed", "type": "call-format", "weight": 0.1},
    {"id": "slow", "type": "timeout", "weight": -0.5},
    {"id": "sound", "type": "degenerate", "required": True},
    {"id": "ours", "type": "python", "value": "checks.py:is_ours"},
]
CHECKS = """
def is_ours(task):
    return 0.5 if "ours" in task["answer"] else 1 / ("breaks" not in task["answer"]), "as it looks"

def keep(task):
    return "unwanted" not in task["main_query"] and (1 / ("broken" not in task["main_query"]) > 0), "not wanted"
"""
ANSWERS = (
    "Hello, \\boxed{7}. It is as you say.",
    "WRONG, and said at length",
    "no",
    "Hello! " * 300,
    "This breaks the check.",
    "It is ours, mail bob@example.com.",
    '{"a": 1}',
    "We met a rate limit there.",
)
Told = dict[str, tuple[str, ...]]


def told(seen: Sequence[TaskResult]) -> Told:
    """What became of each task, by its key: of one that was due again in the same run, what came last."""
    return {
        each.task.key: (
            each.verdict.outcome.value if each.verdict else "held" if each.held else "dead",
            each.verdict.reason or each.verdict.error if each.verdict else each.error,
            str(each.verdict.score if each.verdict else ""),
            each.repeats.key if each.repeats else "",
        )
        for each in seen
    }


async def tried(
    store: Store, config: Any, *, foretell: bool, **how: Any
) -> tuple[JudgingEstimate, JudgingReport, Told]:
    seen: list[TaskResult] = []
    filtering = TaskJudging(store, config)
    preview = await filtering.preview(**how) if foretell else JudgingEstimate()
    report = await filtering.run(on_judged=seen.append, **how)
    return preview, report, told(seen)


def counts(report: JudgingReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in JudgingReport.__slots__ if name != "error"}


@pytest.mark.slow
@pytest.mark.parametrize("is_embedded", [False, True])
async def test_the_real_run_decides_and_costs_what_the_dry_run_said(
    tmp_path: Path, store: Store, make: Make, judge: JudgeServer, embeddings: EmbeddingServer, is_embedded: bool
) -> None:
    # Traced replies have no ground truth, without which these two leave everything undecided.
    assert {each.get("type", "llm-rubric") for each in EVERY} == set(KINDS) - {"expected-tools", "optimal-steps"}
    (tmp_path / "checks.py").write_text(CHECKS)
    config = make(
        {"type": "pii"},
        {"type": "rules", "params": {"min_query_length": 3, "exclude": ["(?i)forbidden"]}},
        {"type": "python", "params": {"path": "checks.py"}},
        {"type": "influence", "params": {"burst": {"count": 4, "seconds": 60}}},
        by_model(embeddings) if is_embedded else {"type": "deduplication"},
        {"type": "llm_evaluate"},
        judge={"base_url": judge.base_url, "model": "j", "max_attempts": 1, "max_thread": 1},
    )

    def rubric(criteria: list[dict[str, Any]], **values: Any) -> None:
        text = {"id": "r", "threshold": 0.3, "criteria": criteria, **values}
        (tmp_path / "rubric.yaml").write_text(yaml.safe_dump(text))

    rubric(EVERY)
    asked = ["x", "unwanted one", "broken one", "forbidden one", WORDY.format(3), f"Please: {WORDY.format(3)}"]
    asked += [f"Question of {name}?" for name in "abcdefghij"]
    everything = [
        reply(n, query=query, answer=ANSWERS[n % len(ANSWERS)], conversation_id=each.conversation_id)
        for n, (query, each) in enumerate(zip(asked * 2, replies_on(Split.TRAIN, 2 * len(asked)), strict=True))
    ]
    await tell(store, *everything[:12], *burst(3))
    await run(store, config)
    rubric([*EVERY[1:], {**EVERY[0], "value": "The answer is wholly right."}])
    await tell(store, *everything[12:], *burst(6)[3:])
    outcomes: set[str] = set()
    for rejudge in (False, True):
        async with copied_state(tmp_path / "state") as copied:
            foretold, dry, said = await tried(copied, config, foretell=True, rejudge=rejudge)
        calls = judge.calls
        _, real, done = await tried(store, config, foretell=False, rejudge=rejudge)
        assert said == done
        assert counts(dry) == counts(real)
        assert dry.error is None
        assert judge.calls - calls == real.calls
        assert (foretold.tasks, foretold.calls) == (len(done), real.calls) or (is_embedded and not rejudge)
        # What would have to be asked for is not: then the calls are no more than foretold.
        assert foretold.calls >= real.calls
        outcomes |= {outcome for outcome, *_ in done.values()}
    assert outcomes == {"accepted", "rejected", "undecided", "dead", "held"}


@pytest.mark.slow
async def test_a_rubric_diff_flips_what_judging_again_changes(
    tmp_path: Path, store: Store, make: Make, judge: JudgeServer
) -> None:
    (tmp_path / "checks.py").write_text(CHECKS)
    config = make({"type": "pii"}, judge={"base_url": judge.base_url, "model": "j", "max_attempts": 1})
    path = tmp_path / "rubric.yaml"
    old = {"id": "r", "threshold": 0.9, "criteria": EVERY, "judge": {"escalate": {"band": [0.4, 0.9], "repeats": 3}}}
    path.write_text(yaml.safe_dump(old))
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old))
    for n, answer in enumerate(ANSWERS):
        asked = [f"Question of {name}, number {n}?" for name in "ab"]
        await tell(store, *(reply(100 * n + at, query=query, answer=answer) for at, query in enumerate(asked)))
    await run(store, config)
    path.write_text(yaml.safe_dump({**old, "threshold": 0.45, "criteria": [*EVERY[:-4], *EVERY[-2:]]}))
    before = await keyed(store)
    async with copied_state(tmp_path / "state") as copied:
        diff = await compared(copied, config, load_rubric(tmp_path / "old.yaml"))
    calls = judge.calls
    report = await TaskJudging(store, config).run(rejudge=True)
    after = await keyed(store)
    flips = {flip["task_id"]: flip["new"]["outcome"] for flip in diff["flips"]}
    assert flips == {key: after[key] for key in after if after[key] != before[key]}
    assert report.changed == len(flips) > 0
    assert diff["judge_all"]["with_cache"]["calls"] == report.calls == judge.calls - calls


async def compared(store: Store, config: Config, old: Rubric) -> dict[str, Any]:
    """The record of a comparison of the configured rubric with another one."""
    comparison = Comparison(store, config, old, rubric_of(config))
    await comparison.prepare(None)
    await comparison.run(lambda: None)
    return comparison.json(("old", "new"), await CostEstimator.of(store, comparison.new.grader.judge_hash, None))


async def keyed(store: Store) -> dict[str, str]:
    query = select(schema.tasks.c.key, schema.tasks.c.state)
    return dict(await store.read(lambda conn: conn.execute(query).all()))  # type: ignore[arg-type]


async def test_no_judge_sees_what_a_chain_takes_out_also_where_it_came_later(
    tmp_path: Path, store: Store, make: Make, judge: JudgeServer
) -> None:
    await tell(store, *questions("I am bob@example.com", "I am not"))
    await run(store, make())
    assert "bob@example.com" in str(judge.requests)
    old = load_rubric(tmp_path / "rubric.yaml")
    config = make({"type": "pii"})
    (tmp_path / "rubric.yaml").write_text(yaml.safe_dump({"id": "r", "criteria": EVERY[1:2]}))
    judge.requests.clear()
    async with copied_state(tmp_path / "state") as copied:
        await compared(copied, config, old)
    await TaskJudging(store, config).run(rejudge=True)
    assert judge.calls == 4
    assert "bob@example.com" not in str(judge.requests)
    assert "[EMAIL_1]" in str(judge.requests)


async def test_shares_hold_for_samples_from_before_there_were_any(store: Store, make: Make) -> None:
    trigger = {"min_samples": 4, "max_samples": 8, "min_held_out": 1}
    (one, *rest) = replies_on(Split.TRAIN, 3)
    same = [reply(100 + n, conversation_id=one.conversation_id, turn=n) for n in range(8)]
    await tell(store, *same, *rest, *replies_on(Split.HELD_OUT, 1, span_id="f" * 16))
    free = make(trigger=trigger, gate={"min_tasks": 1, "min_power": 0})
    await run(store, free)
    assert (await store.read(planner.due, free)).start
    params = {"conversation": 0.25, "template": 1, "user": 1, "burst": None, "widen": False}
    config = make({"type": "influence", "params": params}, trigger=trigger, gate={"min_tasks": 1, "min_power": 0})
    # A round may be due before anything is filtered.
    held_back = await store.read(planner.due, config)
    assert held_back.reason.startswith("3 of 4 samples are free; ")

    def reserve(conn: Connection) -> None:
        move(conn, 1, TaskState.ACCEPTED, TaskState.RESERVED)

    def unknown(conn: Connection) -> int:
        tasks, weighed = schema.tasks, schema.fingerprints
        free = tasks.c.state.in_(["accepted", "reserved"]), tasks.c.split == Split.TRAIN.value
        missing = count_rows(conn, tasks, *free, tasks.c.id.not_in(select(weighed.c.task_id)))
        return missing + 1000 * (count_rows(conn, weighed) == 0)

    await store.write(reserve)
    assert await store.read(unknown) == 1010
    # Nothing is due, and yet they are known after a run: also what a round may give back.
    await run(store, config)
    assert await store.read(unknown) == 0
    assert (await store.read(planner.due, config)).reason.startswith("3 of 4 samples are free; ")


async def test_an_estimate_that_is_cancelled_ends_with_the_tasks_that_it_has_taken(
    store: Store, make: Make, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tell(store, *questions(*(f"{name}?" for name in "abcdefghijkl")))
    filtering = TaskJudging(store, make(judge={"base_url": judge.base_url, "model": "j", "max_thread": 1}))
    begun, go_on = threading.Event(), threading.Event()
    seen: list[Any] = []

    def estimate(exchange: Any, *_: Any) -> CallEstimate:
        seen.append(exchange)
        begun.set()
        go_on.wait(60)
        return CallEstimate()

    monkeypatch.setattr(filtering.grader, "estimate", estimate)
    estimate = asyncio.create_task(filtering.preview())
    await asyncio.to_thread(begun.wait, 60)
    estimate.cancel()
    for _ in range(10):  # until it has heard of it
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await estimate
    assert len(seen) == 4
    assert await states(store) == ["pending"] * 12
