"""Lists of tasks, each with its current verdict (`flywheel.store.verdicts.point`), selected by state, adapter,
criterion or text."""

from __future__ import annotations

import json
import operator
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, exists, func, or_, select, true, tuple_

from flywheel.records.ground_truth import raw_ground_truth
from flywheel.records.request_id import BASE_BY_ID, BASE_VERSION, UNRECORDED
from flywheel.records.states import Split, TaskState
from flywheel.records.trace import get_path
from flywheel.records.verdict import Outcome
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import (
    adapters,
    fingerprints,
    judge_models,
    labels,
    replies,
    sources,
    tasks,
    verdicts,
)
from flywheel.store.labels import majority
from flywheel.store.reply_names import is_of_span
from flywheel.store.verdicts import NOT_OF_THE_JUDGE
from flywheel.store.views.acceptance import JUDGED

_leader = tasks.alias("leader")
RUBRIC: Final = case((tasks.c.state.in_(JUDGED) & ~NOT_OF_THE_JUDGE, verdicts.c.rubric_hash))
"""The hash of the rubric that decided a task; NULL if it is not decided, or a filter or a person decided it."""
ADAPTER: Final = case((tasks.c.adapter != "", tasks.c.adapter), (tasks.c.model == "", UNRECORDED), else_=BASE_VERSION)
"""The adapter that gave a reply, or what stands for it."""
AGENT = case((tasks.c.agent == "", UNRECORDED), else_=tasks.c.agent)
MODEL = case((tasks.c.model == "", UNRECORDED), (tasks.c.model == BASE_BY_ID, BASE_VERSION), else_=tasks.c.model)
JUDGE: Final = func.coalesce(
    select(judge_models.c.model).where(judge_models.c.hash == verdicts.c.judge_hash).scalar_subquery(),
    verdicts.c.judge_hash,
)
"""The model of the judge that gave a verdict, or the judge's hash where the state does not know the model."""
WEEK: Final = case(
    (tasks.c.started_at.between("1970", "2286"), func.date(tasks.c.started_at, "weekday 0", "-6 days"))
)
"""The Monday of the week (UTC) in which a question was asked; NULL for times that sources refuse today."""


class Order(StrEnum):
    """The orders of a list. Tasks without a score follow those that have one."""

    NEWEST = "newest"
    OLDEST = "oldest"
    LOWEST = "lowest"
    HIGHEST = "highest"


class Position(NamedTuple):
    """A place in a list: behind the task with this id; in an order by score also with this score, if it has one."""

    id: int
    score: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        found = _POSITION.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no place in a list")
        return cls(int(found[1]), float(found[2]) if found[2] else None)

    def __str__(self) -> str:
        return str(self.id) if self.score is None else f"{self.id}:{self.score!r}"


_POSITION: Final = re.compile(r"(\d{1,18})(?::(\d{1,20}(?:\.\d{1,20})?(?:e-\d{1,3})?))?", re.ASCII)
_FIRST_STEP: Final = 500
_LONGEST_STEP: Final = 4_000
"""How many tasks a search looks at in one statement, at first and at most: the time is checked between them."""

_BY_SCORE: Final = (Order.LOWEST, Order.HIGHEST)
SEEN: Final = 200
"""The newest verdicts, whose criteria are offered as choices."""
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
    rubric: str | None = None,
    model: str | None = None,
    week: str | None = None,
) -> list[ColumnElement[bool]]:
    """The conditions of a selection; None selects all.

    `adapter` is a version with or without its alias, "base" for no adapter or "unrecorded" where no model is known
    either; `agent` and `model` can be "unrecorded" too. `criterion` is one that the current verdict did not find met;
    `text` is part of the question or the answer, in any case of ASCII letters. `lowest` and `highest` bound the
    current verdict's score. `judge` is the model of its judge, or the hash where none is known, `rubric` the hash of
    the rubric that decided the task, `source` the path of a source, `target` one of the `targets`, `week` the
    Monday (UTC) of the week of the question.
    """
    equal = (
        (tasks.c.state, state), (tasks.c.split, split), (tasks.c.target, target), (AGENT, agent), (MODEL, model),
        (RUBRIC, rubric), (JUDGE, judge), (WEEK, week),
    )  # fmt: skip
    found = [column == str(value) for column, value in equal if value is not None]
    if lowest is not None:
        found.append(verdicts.c.score >= lowest)
    if highest is not None:
        found.append(verdicts.c.score <= highest)
    if adapter is not None:
        found.append(or_(ADAPTER.in_([adapter]), ADAPTER.endswith("@" + adapter, autoescape=True)))
    if criterion is not None:
        result = func.json_each(verdicts.c.results).table_valued("value")
        failed = select(result.c.value).where(
            func.json_extract(result.c.value, "$.criterion") == criterion,
            func.json_extract(result.c.value, "$.passed") == 0,
        )
        found.append(exists(failed.correlate(verdicts)))
    if source is not None:
        path = select(sources.c.id).where(sources.c.path == source).scalar_subquery()
        found.append(exists(select(replies.c.id).where(replies.c.task_id == tasks.c.id, replies.c.source_id == path)))
    if text is not None:
        texts = [func.json_extract(tasks.c.payload, path) for path in ("$.main_query", "$.answer")]
        found.append(or_(*(each.icontains(text, autoescape=True) for each in texts)))
    return found


def choices(conn: Connection) -> dict[str, list[str]]:
    """The adapters and criteria that tasks are selected by. Criteria are those of the newest verdicts."""
    results = select(verdicts.c.results).order_by(verdicts.c.id.desc()).limit(SEEN).subquery()
    result = func.json_each(results.c.results).table_valued("value")
    criterion = func.json_extract(result.c.value, "$.criterion")
    criteria = select(criterion).select_from(results.join(result, true())).distinct().order_by(criterion)
    named = conn.execute(select(adapters.c.name).order_by(adapters.c.id.desc())).scalars()
    return {"criterion": list(conn.execute(criteria).scalars()), "adapter": [BASE_VERSION, UNRECORDED, *named]}


def listed(conn: Connection, wanted: Conditions, limit: int | None = None) -> Sequence[Row[Any]]:
    """Tasks (columns of `tasks`, `origin`, `like`, and the current verdict's `outcome`, `score`, `results`, `reason`,
    `error`, `judged_at`, None where there is none), the newest first."""
    query = (
        select(
            tasks,
            func.coalesce(fingerprints.c.origin, "").label("origin"),
            _leader.c.key.label("like"),
            *(verdicts.c[name] for name in ("outcome", "score", "results", "reason", "error")),
            verdicts.c.created_at.label("judged_at"),
        )
        .select_from(tasks)
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
    conn: Connection,
    wanted: Conditions,
    limit: int,
    after: Position | None = None,
    seconds: float = float("inf"),
    order: Order = Order.NEWEST,
) -> tuple[Sequence[Row[Any]], Position | None]:
    """The first tasks (as `listed`) behind a place of the list that meet the conditions, and where to go on.

    None: there are no more. A search that has taken longer than `seconds` returns what it has found so far, possibly
    nothing: rare words in 100,000 tasks take a second.
    """
    until = time.monotonic() + seconds
    found: list[Position] = []
    at, has_more, step = after, True, _FIRST_STEP
    while has_more and len(found) <= limit and (at is after or time.monotonic() < until):
        part, by, at, has_more = _part(conn, order, at, step)
        query = _of(select(tasks.c.id, verdicts.c.score).select_from(tasks), [*wanted, *part])
        rows = conn.execute(query.order_by(*by).limit(limit + 1 - len(found)))
        found += [Position(row.id, row.score if order in _BY_SCORE else None) for row in rows]
        step = min(2 * step, _LONGEST_STEP)
    shown = {row.id: row for row in listed(conn, [tasks.c.id.in_([each.id for each in found[:limit]])])}
    if len(found) > limit:
        at, has_more = found[limit - 1], True
    return [shown[each.id] for each in found[:limit]], at if has_more else None


def _part(
    conn: Connection, order: Order, after: Position | None, step: int
) -> tuple[Conditions, Sequence[ColumnElement[Any]], Position | None, bool]:
    """The next part of a list, of at most about so many tasks: its conditions, its order, its end, and whether tasks
    can follow."""
    last = conn.execute(select(func.max(tasks.c.id))).scalar_one() or 0
    if order in _BY_SCORE and (after is None or after.score is not None):
        part, by, end = _part_by_score(conn, order is Order.LOWEST, after, step)
        # Those without a score follow, the newest first.
        return part, by, end or Position(last + 1), True
    if order is Order.OLDEST:
        begin = after.id + 1 if after is not None else 1
        part = [tasks.c.id >= begin, tasks.c.id < begin + step]
        return part, [tasks.c.id], Position(begin + step - 1), begin + step <= last
    before = after.id if after is not None else last + 1
    begin = max(1, before - step)
    without = [verdicts.c.score.is_(None)] if order in _BY_SCORE else []
    return [tasks.c.id >= begin, tasks.c.id < before, *without], [tasks.c.id.desc()], Position(begin), begin > 1


def _part_by_score(
    conn: Connection, is_ascending: bool, after: Position | None, step: int
) -> tuple[Conditions, Sequence[ColumnElement[Any]], Position | None]:
    """The same of tasks with a score, without whether tasks can follow; the end is None if they end with it."""
    behind, up_to = (operator.gt, operator.le) if is_ascending else (operator.lt, operator.ge)
    place = verdicts.c.score, verdicts.c.task_id
    by = [each.asc() if is_ascending else each.desc() for each in place]
    part: list[ColumnElement[bool]] = [verdicts.c.score.is_not(None)]
    if after is not None:
        part.append(behind(tuple_(*place), tuple_(after.score, after.id)))
    end = conn.execute(select(*place).where(*part).order_by(*by).offset(step).limit(1)).first()
    if end is not None:
        part.append(up_to(tuple_(*place), tuple_(*end)))
    # By the index of all scores; of the tasks that are found, the current verdict counts.
    return [*part, verdicts.c.task_id == tasks.c.id], by, None if end is None else Position(end[1], end[0])


def count(conn: Connection, wanted: Conditions) -> int:
    """How many tasks meet the conditions."""
    return int(conn.execute(_of(select(func.count()).select_from(tasks), wanted)).scalar_one())


def _of(query: Select[Any], wanted: Conditions) -> Select[Any]:
    return query.outerjoin(verdicts, verdicts.c.id == tasks.c.verdict_id).where(*wanted)


def of_subject(conn: Connection, subject: str) -> Sequence[Row[Any]]:
    """The tasks (as `listed`) of a task id, span, trace or conversation, the newest first."""
    is_its = is_of_span(subject), replies.c.trace_id == subject, replies.c.conversation_id == subject
    of_replies = select(replies.c.task_id).where(or_(*is_its))
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


@dataclass(frozen=True, slots=True)
class ExportedTask:
    """One task; `outcome`, `score`, `results` and `rubric` (its hash) are those of the verdict that decided it. None
    or empty without one. `by_people` is whether most people accept the reply, None without a majority."""

    id: int
    line: dict[str, Any]
    state: TaskState
    by_people: bool | None
    outcome: Outcome | None
    score: float | None
    results: list[dict[str, Any]]
    rubric: str


def count_by_state(conn: Connection) -> dict[tuple[TaskState, Split], int]:
    """How many tasks there are by state and split."""
    kinds = tasks.c.state, tasks.c.split
    rows = conn.execute(select(*kinds, func.count()).group_by(*kinds))
    return {(TaskState(state), Split(split)): number for state, split, number in rows}


def next_ids(
    conn: Connection,
    states: Collection[TaskState],
    splits: Collection[Split],
    target: str | None = None,
    *,
    if_labelled: Collection[TaskState] = (),
    after: int,
    limit: int,
) -> list[int]:
    """The ids of the next tasks of a target (None: of all) behind `after`, the oldest first: those in `states`, and
    in other states if anybody has labelled them."""
    labelled = tasks.c.id.in_(select(labels.c.task_id))
    where: list[ColumnElement[bool]] = [
        tasks.c.id > after,
        or_(
            tasks.c.state.in_([state.value for state in states]),
            and_(tasks.c.state.in_([state.value for state in if_labelled]), labelled),
        ),
        tasks.c.split.in_([split.value for split in splits]),
    ]
    if target is not None:
        where.append(tasks.c.target == target)
    return list(conn.execute(select(tasks.c.id).where(*where).order_by(tasks.c.id).limit(limit)).scalars())


def with_verdicts(conn: Connection, ids: Sequence[int]) -> list[ExportedTask]:
    """The tasks with these ids, in the order of the ids; one that is gone is left out."""
    deciding = and_(verdicts.c.id == tasks.c.verdict_id, verdicts.c.outcome != Outcome.UNDECIDED.value)
    of_verdict = (verdicts.c[name] for name in ("outcome", "score", "results", "rubric_hash"))
    columns = tasks.c.id, tasks.c.payload, tasks.c.state, majority().label("votes"), *of_verdict
    query = select(*columns).select_from(tasks).outerjoin(verdicts, deciding)
    found = {
        row.id: ExportedTask(
            row.id,
            dict(row.payload),
            TaskState(row.state),
            row.votes > 0 if row.votes else None,
            None if row.outcome is None else Outcome(row.outcome),
            row.score,
            row.results or [],
            row.rubric_hash or "",
        )
        for row in rows_in(conn, query, tasks.c.id, list(set(ids)))
    }
    return [found[number] for number in ids if number in found]
