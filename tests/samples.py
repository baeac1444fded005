"""Replies, batches and verdicts for tests that do not need a real source or judge."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from flywheel.records.batch import Batch, entry_of
from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.states import Split
from flywheel.records.task import split_of
from flywheel.records.trace import Cursor, Reply
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.store import claims, verdicts

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def reply(number: int, **values: Any) -> Reply:
    started = START + timedelta(seconds=number)
    defaults: dict[str, Any] = {
        "span_id": f"span{number:012d}",
        "trace_id": f"trace{number:027d}",
        "conversation_id": f"conversation-{number}",
        "agent": "Tutor",
        "query": f"What is {number} plus 1?",
        "answer": f"\\boxed{{{number + 1}}}",
        "started_at": started,
        "ended_at": started + timedelta(seconds=1),
        "history": ({"role": "system", "content": "You do sums."},),
    }
    return Reply(**{**defaults, **values})


def batch(
    *replies: Reply, rowid: int = 1, source: str = "/a", models: TrainedModels = ANY_MODEL, **values: Any
) -> Batch:
    entries = tuple(entry_of(reply, source, models) for reply in replies)
    return Batch(cursor=Cursor(rowid=rowid, identity="1:2", fingerprint="f"), entries=entries, **values)


def replies_on(split: Split, count: int, **values: Any) -> list[Reply]:
    """Replies whose conversations are all on one side of the default split."""
    found: list[Reply] = []
    number = 0
    while len(found) < count:
        candidate = reply(number, **values)
        number += 1
        if split_of(candidate.conversation_id, candidate.trace_id, train_ratio=0.7, seed=42) is split:
            found.append(candidate)
    return found


def settle(conn: Connection, task: int, verdict: Verdict, rubric: str, judge: str, retry_seconds: float) -> None:
    """Store a verdict and move its task out of `judging`."""
    verdicts.store(conn, task, verdict, rubric, judge)
    claims.apply(conn, task, verdict, retry_seconds)


def accepted(score: float = 1.0) -> Verdict:
    result = CriterionResult("correct", "yes", 1.0, True, "it is right")
    return Verdict(Outcome.ACCEPTED, score, (result,), "good", calls=1, prompt_tokens=10, completion_tokens=5)


def rejected() -> Verdict:
    result = CriterionResult("correct", "no", 0.0, False, "it is wrong")
    return Verdict(Outcome.REJECTED, 0.0, (result,), "bad", calls=1, prompt_tokens=10, completion_tokens=5)


def undecided() -> Verdict:
    return Verdict(Outcome.UNDECIDED, None, error="HTTP 500", calls=4)
