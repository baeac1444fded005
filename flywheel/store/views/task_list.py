"""Lists of tasks, each with its newest verdict, selected by state, adapter, criterion or text."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Select, case, exists, func, or_, select, true

from flywheel.records.ground_truth import raw_ground_truth
from flywheel.records.request_id import BASE_VERSION, UNRECORDED
from flywheel.records.states import Split, TaskState
from flywheel.records.trace import get_path
from flywheel.records.verdict import Outcome
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import (
    adapters,
    fingerprints,
    influences,
    judge_models,
    replies,
    sources,
    tasks,
    verdicts,
)

_leader = tasks.alias("leader")
_later = verdicts.alias("later")
_NEWEST: Final = (
    select(_later.c.id)
    .where(_later.c.task_id == tasks.c.id)
    .order_by(_later.c.created_at.desc(), _later.c.id.desc())
    .limit(1)
    .correlate(tasks)
    .scalar_subquery()
)


_FIRST_STEP: Final = 500
_LONGEST_STEP: Final = 4_000
"""How many ids a search looks at in one statement, at first and at most: the time is checked between them."""

SEEN: Final = 200
"""The newest tasks and verdicts, whose agents and criteria are offered as choices."""
Conditions = Sequence[ColumnElement[bool]]


def conditions(
    state: TaskState | None = None,
    adapter: str | None = None,
    criterion: str | None = None,
    text: str | None = None,
    *,
    agent: str | None = None,
    split: Split | None = None,
    lowest: float | None = None,
    highest: float | None = None,
    judge: str | None = None,
    source: str | None = None,
    target: str | None = None,
) -> list[ColumnElement[bool]]:
    """The conditions of a selection; None selects all.

    `adapter` is a version with or without its alias, "base" for the base model or "unrecorded" where no
    model is known; `criterion` is one that the newest
    verdict did not find met; `text` is part of the question or the answer, in any case of ASCII letters. `lowest` and
    `highest` bound the newest verdict's score. `judge` is the model or the hash of the newest verdict's judge,
    `source` the path of a source, `target` one of the `targets`.
    """
    found: list[ColumnElement[bool]] = []
    if agent is not None:
        found.append(tasks.c.agent == agent)
    if split is not None:
        found.append(tasks.c.split == split.value)
    if target is not None:
        found.append(tasks.c.target == target)
    if lowest is not None:
        found.append(verdicts.c.score >= lowest)
    if highest is not None:
        found.append(verdicts.c.score <= highest)
    if state is not None:
        found.append(tasks.c.state == state.value)
    if adapter is not None:
        names = tasks.c.adapter
        is_it = names.endswith("@" + adapter, autoescape=True)
        if adapter in (BASE_VERSION, UNRECORDED):
            is_it = (names == "") & ((tasks.c.model != "") if adapter == BASE_VERSION else (tasks.c.model == ""))
        found.append(or_(is_it, names == adapter))
    if criterion is not None:
        result = func.json_each(verdicts.c.results).table_valued("value")
        failed = select(result.c.value).where(
            func.json_extract(result.c.value, "$.criterion") == criterion,
            func.json_extract(result.c.value, "$.passed") == 0,
        )
        found.append(exists(failed.correlate(verdicts)))
    if judge is not None:
        models = select(judge_models.c.hash).where(judge_models.c.model == judge)
        found.append(or_(verdicts.c.judge_hash == judge, verdicts.c.judge_hash.in_(models)))
    if source is not None:
        path = select(sources.c.id).where(sources.c.path == source).scalar_subquery()
        found.append(exists(select(replies.c.id).where(replies.c.task_id == tasks.c.id, replies.c.source_id == path)))
    if text is not None:
        texts = [func.json_extract(tasks.c.payload, path) for path in ("$.main_query", "$.answer")]
        found.append(or_(*(each.icontains(text, autoescape=True) for each in texts)))
    return found


def choices(conn: Connection) -> dict[str, list[str]]:
    """Values that tasks have, by what they are selected by. Agents and criteria are those of the newest tasks."""
    newest = select(tasks.c.agent).order_by(tasks.c.id.desc()).limit(SEEN).subquery()
    results = select(verdicts.c.results).order_by(verdicts.c.id.desc()).limit(SEEN).subquery()
    result = func.json_each(results.c.results).table_valued("value")
    criterion = func.json_extract(result.c.value, "$.criterion")
    queries = {
        "agent": select(newest.c.agent).where(newest.c.agent != "").distinct().order_by(newest.c.agent),
        "adapter": select(adapters.c.name).order_by(adapters.c.id.desc()),
        "criterion": select(criterion).select_from(results.join(result, true())).distinct().order_by(criterion),
        "judge": select(judge_models.c.model).distinct().order_by(judge_models.c.model),
        "source": select(sources.c.path).order_by(sources.c.path),
    }
    found = {name: list(conn.execute(query).scalars()) for name, query in queries.items()}
    return {**found, "adapter": [BASE_VERSION, UNRECORDED, *found["adapter"]]}


def listed(conn: Connection, wanted: Conditions, limit: int | None = None) -> Sequence[Row[Any]]:
    """Tasks (columns of `tasks`, `origin`, `like`, and the newest verdict's `outcome`, `score`, `results`, `reason`,
    `error`, `judged_at`, None where there is none), the newest first."""
    query = (
        select(
            tasks,
            func.coalesce(influences.c.origin, "").label("origin"),
            _leader.c.key.label("like"),
            *(verdicts.c[name] for name in ("outcome", "score", "results", "reason", "error")),
            verdicts.c.created_at.label("judged_at"),
        )
        .select_from(tasks)
        .outerjoin(influences, influences.c.task_id == tasks.c.id)
        .outerjoin(fingerprints, fingerprints.c.task_id == tasks.c.id)
        .outerjoin(_leader, _leader.c.id == fingerprints.c.like)
    )
    if limit is None:
        found = _of(query, wanted)
    else:
        # The ids first, from an index where there is one: a sort would carry the payload of every task.
        chosen = _of(select(tasks.c.id).select_from(tasks), wanted).order_by(tasks.c.id.desc()).limit(limit)
        found = _of(query, [tasks.c.id.in_(chosen.scalar_subquery())])
    return conn.execute(found.order_by(tasks.c.id.desc())).all()


def search(
    conn: Connection, wanted: Conditions, limit: int, before: int | None = None, seconds: float = float("inf")
) -> tuple[Sequence[Row[Any]], int | None]:
    """The newest tasks (as `listed`) before this id that meet the conditions, and the id before which to go on.

    None: there are no more. A search that has taken longer than `seconds` returns what it has found so far, possibly
    nothing: rare words in 100,000 tasks take a second.
    """
    until = time.monotonic() + seconds
    end = before if before is not None else (conn.execute(select(func.max(tasks.c.id))).scalar_one() or 0) + 1
    found: list[int] = []
    step = _FIRST_STEP
    while end > 1 and len(found) <= limit and time.monotonic() < until:
        begin = max(1, end - step)
        chosen = _of(select(tasks.c.id).select_from(tasks), [*wanted, tasks.c.id >= begin, tasks.c.id < end])
        newest = chosen.order_by(tasks.c.id.desc()).limit(limit + 1 - len(found))
        found += conn.execute(newest).scalars()
        end, step = begin, min(2 * step, _LONGEST_STEP)
    rows = listed(conn, [tasks.c.id.in_(found[:limit])])
    if len(found) > limit:
        return rows, found[limit - 1]
    return rows, end if end > 1 else None


def count(conn: Connection, wanted: Conditions) -> int:
    """How many tasks meet the conditions."""
    return int(conn.execute(_of(select(func.count()).select_from(tasks), wanted)).scalar_one())


def _of(query: Select[Any], wanted: Conditions) -> Select[Any]:
    return query.outerjoin(verdicts, verdicts.c.id == _NEWEST).where(*wanted)


def of_subject(conn: Connection, subject: str) -> Sequence[Row[Any]]:
    """The tasks (as `listed`) of a task id, span, trace or conversation, the newest first."""
    ids = (replies.c.span_id, replies.c.trace_id, replies.c.conversation_id)
    of_replies = select(replies.c.task_id).where(or_(*(column == subject for column in ids)))
    return listed(conn, [or_(tasks.c.key == subject, tasks.c.id.in_(of_replies))])


def questions(conn: Connection, keys: Sequence[str]) -> dict[str, str]:
    """The questions of tasks by key."""
    query = select(tasks.c.key, func.json_extract(tasks.c.payload, "$.main_query").label("question"))
    return {row.key: row.question or "" for row in rows_in(conn, query, tasks.c.key, keys)}


def _support(line: Mapping[str, Any]) -> dict[str, Any]:
    """The document that a task was written from, and the quotes that support its answer; empty for other tasks."""
    document, quotes = (get_path(raw_ground_truth(line), name) for name in ("document", "quotes"))
    is_written = isinstance(document, str) and isinstance(quotes, list)
    return {"document": document, "quotes": [str(quote) for quote in quotes]} if is_written else {}


def summary(row: Row[Any]) -> dict[str, Any]:
    """A task in short, as `flywheel tasks --json` prints it."""
    return {
        "task_id": row.key,
        **({"target": row.target} if row.target else {}),
        "state": row.state,
        "split": row.split,
        "score": row.score,
        "failed": [result["criterion"] for result in row.results or () if not result["passed"]],
        "reason": row.reason or row.error or "",
        "agent": row.agent,
        "adapter": row.adapter,
        "query": row.payload["main_query"],
        "answer": row.payload["answer"],
        "conversation_id": row.payload["metadata"]["conversation_id"],
        "started_at": row.payload["metadata"]["started_at"],
        "origin": row.origin,
        "like": row.like,
        **_support(row.payload),
    }


def detail(row: Row[Any]) -> dict[str, Any]:
    """A task in full, as `flywheel show --json` prints it."""
    line = row.payload
    facts = line["metadata"]
    verdict = None
    if row.outcome is not None:
        verdict = {
            "outcome": row.outcome,
            "score": row.score,
            "reason": row.reason or row.error,
            "at": row.judged_at,
            "criteria": [
                {key: each[key] for key in ("criterion", "choice", "value", "passed", "reason")}
                for each in row.results
            ],
        }
    return {
        "task_id": row.key,
        **({"target": row.target} if row.target else {}),
        "state": row.state,
        "split": row.split,
        "agent": row.agent,
        "adapter": row.adapter,
        "model": facts["model"],
        "source": facts["source"],
        "trace_id": facts["trace_id"],
        "span_id": facts["span_id"],
        "conversation_id": facts["conversation_id"],
        "started_at": facts["started_at"],
        "history": line["init_messages"],
        "question": line["main_query"],
        "steps": json.loads(facts["trajectory_json"]),
        "answer": line["answer"],
        "reference": facts["reference"],
        **_support(line),
        "verdict": verdict,
    }


_ACCEPTED: Final = (TaskState.ACCEPTED, TaskState.RESERVED, TaskState.CONSUMED)
"""An accepted task stays accepted when a round takes it."""


@dataclass(frozen=True, slots=True)
class ExportedTask:
    """One task; `outcome` and `score` are those of the verdict that decided it, None without one."""

    id: int
    line: dict[str, Any]
    state: TaskState
    outcome: Outcome | None
    score: float | None


def count_by_state(conn: Connection) -> dict[tuple[TaskState, Split], int]:
    """How many tasks there are by state and split."""
    rows = conn.execute(select(tasks.c.state, tasks.c.split, func.count()).group_by(tasks.c.state, tasks.c.split))
    return {(TaskState(state), Split(split)): number for state, split, number in rows}


def next_ids(
    conn: Connection,
    states: Collection[TaskState],
    splits: Collection[Split],
    target: str | None = None,
    *,
    after: int,
    limit: int,
) -> list[int]:
    """The ids of the next tasks of a target (None: of all) behind `after`, the oldest first."""
    where: list[ColumnElement[bool]] = [
        tasks.c.id > after,
        tasks.c.state.in_([state.value for state in states]),
        tasks.c.split.in_([split.value for split in splits]),
    ]
    if target is not None:
        where.append(tasks.c.target == target)
    return list(conn.execute(select(tasks.c.id).where(*where).order_by(tasks.c.id).limit(limit)).scalars())


def with_verdicts(conn: Connection, ids: Sequence[int]) -> list[ExportedTask]:
    """The tasks with these ids, in the order of the ids; one that is gone is left out."""
    # After a change of rubric and back an older verdict decides again: it need not be the newest.
    decided = case(
        (tasks.c.state == TaskState.REJECTED.value, Outcome.REJECTED.value),
        (tasks.c.state.in_([state.value for state in _ACCEPTED]), Outcome.ACCEPTED.value),
        else_=verdicts.c.outcome,
    )
    newest = (
        select(func.max(verdicts.c.id))
        .where(verdicts.c.task_id == tasks.c.id, verdicts.c.outcome == decided)
        .where(verdicts.c.outcome != Outcome.UNDECIDED.value)
        .correlate(tasks)
        .scalar_subquery()
    )
    query = select(tasks.c.id, tasks.c.payload, tasks.c.state, verdicts.c.outcome, verdicts.c.score).outerjoin(
        verdicts, verdicts.c.id == newest
    )
    found = {
        row.id: ExportedTask(
            row.id,
            dict(row.payload),
            TaskState(row.state),
            None if row.outcome is None else Outcome(row.outcome),
            row.score,
        )
        for row in rows_in(conn, query, tasks.c.id, list(set(ids)))
    }
    return [found[number] for number in ids if number in found]
