"""Verdicts that are stored, as the judge gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from flywheel.store.bulk import chunks
from flywheel.store.schema import verdicts
from flywheel.verdict import CriterionResult, Judgement, Outcome, Verdict


def of_tasks(conn: Connection, ids: Sequence[int], judge_hash: str) -> dict[int, list[tuple[str, Verdict]]]:
    """The decided verdicts of a judge on these tasks, each with the hash of its rubric, the newest first."""
    found: dict[int, list[tuple[str, Verdict]]] = {}
    for some in chunks(ids):
        for row in conn.execute(
            select(verdicts)
            .where(
                verdicts.c.task_id.in_(some),
                verdicts.c.judge_hash == judge_hash,
                verdicts.c.outcome != Outcome.UNDECIDED.value,
            )
            .order_by(verdicts.c.id.desc())
        ):
            found.setdefault(row.task_id, []).append((row.rubric_hash, _verdict(row)))
    return found


def _verdict(row: Row[Any]) -> Verdict:
    judgements = tuple(
        Judgement(**{**each, "outcome": Outcome(each["outcome"]), "results": _results(each["results"])})
        for each in row.judgements
    )
    return Verdict(Outcome(row.outcome), row.score, _results(row.results), row.reason, judgements=judgements)


def _results(stored: Sequence[Mapping[str, Any]]) -> tuple[CriterionResult, ...]:
    return tuple(CriterionResult(**result) for result in stored)
