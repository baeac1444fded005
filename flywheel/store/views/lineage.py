"""Lineage: from an adapter back to the conversations that it was trained on, and from a trace to its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Connection, Row, RowMapping, Select, and_, func, literal, or_, select

from flywheel.records.exclusion import NONE_SELECTED, WORDS, Exclusion, TaskScopes
from flywheel.records.states import Split, TaskState
from flywheel.store import watches
from flywheel.store.kernel.bulk import count_rows, rows_in
from flywheel.store.kernel.schema import (
    adapters,
    deployments,
    duplicates,
    events,
    replies,
    round_samples,
    rounds,
    sources,
    tasks,
    verdicts,
)
from flywheel.store.reply_names import is_of_span

DEEPEST: Final = 1_000
"""Generations of adapters that are followed; a state can hold no cycle, but a damaged one might."""

_SAMPLES: Final = round_samples.join(tasks, tasks.c.id == round_samples.c.task_id)
TRAINED_ON: Final = and_(round_samples.c.split == Split.TRAIN.value, ~round_samples.c.left_out)
"""What a round was trained on."""


SubjectKind = Literal["task", "conversation", "trace", "span"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What an id names, with a condition for its replies (in `replies` joined with `tasks`)."""

    kind: SubjectKind
    id: str
    is_its: ColumnElement[bool]


def samples(conn: Connection, round_ids: Sequence[int]) -> dict[int, int]:
    """How many samples each of these rounds was trained on."""
    number = round_samples.c.round_id
    counted = select(number, func.count()).where(TRAINED_ON).group_by(number)
    return dict.fromkeys(round_ids, 0) | dict(rows_in(conn, counted, number, round_ids))


def ancestors(conn: Connection, adapter: str) -> list[str]:
    """The adapters that an adapter goes back to, from its parent on; the last one was trained from the base model."""
    line = (
        select(adapters.c.parent.label("name"), literal(1).label("depth"))
        .where(adapters.c.name == adapter)
        .cte("line", recursive=True)
    )
    further = select(adapters.c.parent, line.c.depth + 1).join(line, adapters.c.name == line.c.name)
    line = line.union_all(further.where(line.c.depth < DEEPEST))
    query = select(line.c.name).where(line.c.name.is_not(None)).order_by(line.c.depth)
    return list(conn.execute(query).scalars())


def descendants(conn: Connection, names: Iterable[str]) -> dict[str, str]:
    """The adapters that were trained from these or from their descendants, in their order, each with its parent."""
    known = set(names)
    found: dict[str, str] = {}
    # A parent is always older than its child.
    for name, parent in conn.execute(select(adapters.c.name, adapters.c.parent).order_by(adapters.c.id)):
        if parent in known:
            known.add(name)
            found[name] = parent
    return found


def subject(conn: Connection, name: str) -> Subject | None:
    """What an id names, if replies have it: a task, a conversation, a trace or a span."""
    ways: tuple[tuple[SubjectKind, ColumnElement[bool]], ...] = (
        ("task", tasks.c.key == name),
        ("conversation", replies.c.id.in_(_replies_of_conversation(name))),
        ("trace", replies.c.trace_id == name),
        ("span", or_(is_of_span(name), replies.c.own_id == name)),
    )
    for kind, is_its in ways:
        if conn.execute(_replies(replies.c.id).where(is_its).limit(1)).first() is not None:
            return Subject(kind, name, is_its)
    return None


def replies_of(conn: Connection, found: Subject, limit: int | None = None, after: int = 0) -> Sequence[Row[Any]]:
    """The replies of a subject in their order, each with `source` and `source_type`, and if it has a task, with
    `key`, `split`, `task_state` and `question` of it; only those `after` a number."""
    of_task = tasks.c.key, tasks.c.split, tasks.c.state.label("task_state")
    question = func.json_extract(tasks.c.payload, "$.main_query").label("question")
    of_source = sources.c.path.label("source"), sources.c.type.label("source_type")
    query = _replies(*replies.c, *of_task, question, *of_source)
    with_source = query.join(sources, sources.c.id == replies.c.source_id)
    own = with_source.where(found.is_its, replies.c.id > after).order_by(replies.c.id)
    return conn.execute(own.limit(limit)).all()


def first_task(conn: Connection, found: Subject) -> str | None:
    """The key of the task of the first reply of a subject that has one."""
    with_task = _replies(tasks.c.key).where(found.is_its, tasks.c.key.is_not(None))
    return conn.execute(with_task.order_by(replies.c.id).limit(1)).scalar_one_or_none()


def uses(conn: Connection, found: Subject) -> Sequence[Row[Any]]:
    """The rounds that used the tasks of a subject, the oldest first: `round`, `state`, `split`, how many `tasks`, how
    many of them were not trained on (`left_out`), and `adapter`, None without one."""
    of_round = rounds.c.name.label("round"), rounds.c.state, adapters.c.name.label("adapter")
    left_out = func.count().filter(round_samples.c.left_out).label("left_out")
    query = (
        select(*of_round, round_samples.c.split, func.count().label("tasks"), left_out)
        .select_from(round_samples.join(rounds).outerjoin(adapters))
        .where(round_samples.c.task_id.in_(_replies(replies.c.task_id).where(found.is_its)))
        .group_by(rounds.c.id, round_samples.c.split)
        .order_by(rounds.c.id, round_samples.c.split)
    )
    return conn.execute(query).all()


def _replies(*columns: ColumnElement[Any]) -> Select[Any]:
    return select(*columns).select_from(replies).outerjoin(tasks, tasks.c.id == replies.c.task_id)


def _replies_of_conversation(name: str) -> Select[Any]:
    """The numbers of the replies of a conversation: of its tasks by an index, and those without a task."""
    by_task = select(tasks.c.id).where(tasks.c.conversation_id == name)
    without = and_(replies.c.conversation_id == name, replies.c.task_id.is_(None))
    return select(replies.c.id).where(or_(replies.c.task_id.in_(by_task), without))


_originals: Final = tasks.alias("originals")
_ROUND: Final = (
    "state", "trigger", "reason", "attempt", "parent", "seed", "config_hash", "rubric_hash", "created_at",
    "finished_at",
)  # fmt: skip
_REPLY: Final = (
    "source", "span_id", "trace_id", "conversation_id", "agent", "state", "skip_reason", "detail",
)  # fmt: skip


def why(conn: Connection, name: str, takes: TaskScopes = NONE_SELECTED) -> dict[str, Any] | None:
    """The story of an adapter or round (`r0007`, `ALIAS@r0007`), a task, a span, a trace or a conversation.

    `takes` are the exclusions that do not keep tasks from rounds. Each reply also has a `name` for people.
    """
    of_round = select(rounds).where(rounds.c.name == name.rpartition("@")[2])
    found = conn.execute(of_round).mappings().one_or_none()
    if found is not None:
        return _round_story(conn, found)
    if (named := subject(conn, name)) is None:
        return None
    stories = [
        {
            "name": _name(row),
            **{key: getattr(row, key) for key in _REPLY},
            "task": task_story(conn, row.task_id, takes),
        }
        for row in replies_of(conn, named)
    ]
    return {"kind": "trace", "id": name, "replies": stories}


def _name(row: Row[Any]) -> str:
    """What people call a reply: its span, or the id that its file gives the row, of which `span_id` is a hash."""
    if row.source_type != "jsonl":
        return f"span {row.span_id}"
    return f"row {row.own_id or row.key or row.span_id}"


def _round_story(conn: Connection, row: RowMapping) -> dict[str, Any]:
    adapter = conn.execute(select(adapters).where(adapters.c.round_id == row["id"])).mappings().one_or_none()
    of_task = tasks.c.key, tasks.c.conversation_id, tasks.c.agent, tasks.c.adapter, tasks.c.structure
    own = round_samples.c.round_id == row["id"]
    query = select(*of_task, round_samples.c.replayed).select_from(_SAMPLES).where(own, TRAINED_ON)
    train = conn.execute(query.order_by(tasks.c.id)).all()
    result = row["result"] or {}
    served = conn.execute(
        select(deployments).where(deployments.c.adapter == row["name"]).order_by(deployments.c.id)
    ).mappings()
    comparison = result.get("comparison")
    return {
        "kind": "round",
        "id": row["name"],
        **_target(row),
        **{key: row[key] for key in _ROUND},
        "adapter": adapter and {key: adapter[key] for key in ("name", "path", "sha256", "state", "base_model")},
        "candidate": result.get("candidate"),
        "comparison": comparison and {key: value for key, value in comparison.items() if key != "scores"},
        "versions": result.get("versions", {}),
        "usage": result.get("usage", {}),
        "sampling": result.get("sampling"),
        "selection": row["selection"],
        "samples": [
            {
                "task_id": s.key,
                "conversation_id": s.conversation_id,
                "agent": s.agent,
                "served_by": s.adapter,
                "class": s.structure,
                "replayed": s.replayed,
            }
            for s in train
        ],
        "conversations": sorted({s.conversation_id for s in train}),
        "left_out": result.get("left_out", {}),
        "released": len(result.get("released", ())),
        "held_out": count_rows(conn, round_samples, own, round_samples.c.split == Split.HELD_OUT.value),
        "deployments": [
            {key: d[key] for key in ("alias", "state", "reason", "previous", "activated_at", "retired_at", "error")}
            for d in served
        ],
        "watches": [watches.as_json(watch) for watch in watches.of_adapters(conn, [row["name"]])],
    }


def _target(row: RowMapping) -> dict[str, str]:
    """The target of a round or task, if it has one."""
    return {"target": row["target"]} if row["target"] else {}


def _exclusion_reason(reason: Exclusion, task: RowMapping) -> str:
    metadata = task["payload"]["metadata"]
    match reason:
        case Exclusion.HIDDEN | Exclusion.INEXACT | Exclusion.IMAGE:
            return str(metadata["prompt_reason"]) or WORDS[reason].why
        case Exclusion.MODEL:
            return f"{WORDS[reason].why}: {task['model']}"
    return WORDS[reason].why


def task_story(conn: Connection, number: int | None, takes: TaskScopes) -> dict[str, Any] | None:
    """The verdicts, rounds and history of a task, and why rounds leave it out; None without a number."""
    if number is None:
        return None
    task = conn.execute(select(tasks).where(tasks.c.id == number)).mappings().one()
    judged = conn.execute(select(verdicts).where(verdicts.c.task_id == task["id"]).order_by(verdicts.c.id)).mappings()
    used = conn.execute(
        select(rounds.c.name, rounds.c.state, round_samples.c.split, round_samples.c.replayed)
        .join(round_samples, round_samples.c.round_id == rounds.c.id)
        .where(round_samples.c.task_id == task["id"])
        .order_by(rounds.c.id)
    )
    history = conn.execute(
        select(events.c.at, events.c.old, events.c.new, events.c.detail)
        .where(events.c.kind == tasks.name, events.c.subject == str(task["id"]))
        .order_by(events.c.id)
    )
    repeats = conn.execute(
        select(_originals.c.key, duplicates.c.similarity, duplicates.c.method)
        .join(_originals, _originals.c.id == duplicates.c.original_id)
        .where(duplicates.c.task_id == task["id"])
    ).one_or_none()
    return {
        "task_id": task["key"],
        **_target(task),
        "state": task["state"],
        "split": task["split"],
        "served_by": task["adapter"],
        "class": task["structure"],
        "query": task["payload"]["main_query"],
        "answer": task["payload"]["answer"],
        "left_out": [
            {"reason": each.value, "why": _exclusion_reason(each, task)}
            for each in takes.leaving_out(
                task["excluded"], Split(task["split"]), is_rejected=task["state"] == TaskState.REJECTED
            )
        ],
        "repeats": repeats and {"task_id": repeats.key, "similarity": repeats.similarity, "method": repeats.method},
        "verdicts": [
            {
                **{key: v[key] for key in ("outcome", "score", "reason", "error", "rubric_hash", "judge_hash")},
                "failed": [result["criterion"] for result in v["results"] if not result["passed"]],
                "at": v["created_at"],
            }
            for v in judged
        ],
        "rounds": [{"round": u.name, "state": u.state, "split": u.split, "replayed": u.replayed} for u in used],
        "history": [{"at": h.at, "old": h.old, "new": h.new, "detail": h.detail} for h in history],
    }
