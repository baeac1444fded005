"""Verdicts, and tasks that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from flywheel.records.states import Split
from flywheel.records.trace import Reply
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.store import claims, verdicts
from tests.factories.trace import on_both_sides, put_replies, replies_on

Judge = Callable[[dict[str, Any]], Verdict]
"""The verdict on a task, by its line."""


def accepted(score: float = 1.0) -> Verdict:
    result = CriterionResult("correct", "yes", 1.0, True, "it is right")
    return Verdict(Outcome.ACCEPTED, score, (result,), "good", calls=1, prompt_tokens=10, completion_tokens=5)


def rejected() -> Verdict:
    result = CriterionResult("correct", "no", 0.0, False, "it is wrong")
    return Verdict(Outcome.REJECTED, 0.0, (result,), "bad", calls=1, prompt_tokens=10, completion_tokens=5)


def undecided() -> Verdict:
    return Verdict(Outcome.UNDECIDED, None, error="HTTP 500", calls=4)


def scored(score: float | None) -> Verdict:
    """The verdict on a rollout with this reward; None is undecided."""
    if score is None:
        return undecided()
    return Verdict(Outcome.ACCEPTED if score > 0.5 else Outcome.REJECTED, score, calls=1, prompt_tokens=10)


def settle(conn: Connection, task: int, verdict: Verdict, rubric: str, judge: str, retry_seconds: float) -> None:
    """Store a verdict and move its task out of `judging`."""
    verdicts.store(conn, task, verdict, rubric, judge)
    claims.apply(conn, task, verdict, retry_seconds)


def judge_all(conn: Connection, judge: Judge = lambda _: accepted()) -> None:
    """Judge every task that is due, by the rubric `r` and the judge `j`."""
    for task in claims.claim(conn, 100_000, "r", "j"):
        settle(conn, task.id, judge(task.line), "r", "j", 0.0)


def put_judged(conn: Connection, *replies: Reply, judge: Judge = lambda _: accepted(), **values: Any) -> None:
    """Tasks with verdicts. `values` are those of `put_replies`."""
    put_replies(conn, *replies, **values)
    judge_all(conn, judge)


def only_training_accepted(line: dict[str, Any]) -> Verdict:
    return accepted() if line["metadata"]["split"] == "train" else rejected()


def put_tasks(conn: Connection, train: int, held_out: int) -> None:
    """Judged tasks. Every other one that is held out was rejected."""
    put_replies(conn, *on_both_sides(train, held_out))
    for number, task in enumerate(claims.claim(conn, 1000, "r", "j")):
        verdict = rejected() if task.line["metadata"]["split"] == "held-out" and number % 2 else accepted()
        settle(conn, task.id, verdict, "r", "j", 0.0)


def put_more_tasks(conn: Connection, train: int) -> None:
    """Accepted samples beyond those of `put_tasks`."""
    put_judged(conn, *replies_on(Split.TRAIN, 6 + train)[6:], rowid=2)
