"""Lineage: from an adapter back to the conversations that it was trained on, and from a trace to its outcome."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, RowMapping, or_, select

from flywheel.records.exclusion import NONE_SELECTED, WORDS, Exclusion, Selected
from flywheel.records.states import Split, TaskState
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

_originals: Final = tasks.alias("originals")
_ROUND: Final = (
    "state", "trigger", "reason", "attempt", "parent", "seed", "config_hash", "rubric_hash", "created_at",
    "finished_at",
)  # fmt: skip
_REPLY: Final = (
    "source", "span_id", "trace_id", "conversation_id", "agent", "state", "skip_reason", "detail",
)  # fmt: skip


def why(conn: Connection, subject: str, takes: Selected = NONE_SELECTED) -> dict[str, Any] | None:
    """The story of an adapter or round (`r0007`, `ALIAS@r0007`), a task, a span, a trace or a conversation.

    `takes` are the exclusions that do not keep tasks from rounds.
    """
    name = subject.rpartition("@")[2]
    found = conn.execute(select(rounds).where(rounds.c.name == name)).mappings().one_or_none()
    if found is not None:
        return _round_story(conn, found)
    rows = (
        conn.execute(
            select(replies, sources.c.path.label("source"))
            .join(sources, replies.c.source_id == sources.c.id)
            .outerjoin(tasks, replies.c.task_id == tasks.c.id)
            .where(
                or_(
                    replies.c.span_id == subject,
                    replies.c.trace_id == subject,
                    replies.c.conversation_id == subject,
                    tasks.c.key == subject,
                )
            )
            .order_by(replies.c.id)
        )
        .mappings()
        .all()
    )
    stories = [{**{key: row[key] for key in _REPLY}, "task": task_story(conn, row["task_id"], takes)} for row in rows]
    return {"kind": "trace", "id": subject, "replies": stories} if rows else None


def _round_story(conn: Connection, row: RowMapping) -> dict[str, Any]:
    adapter = conn.execute(select(adapters).where(adapters.c.round_id == row["id"])).mappings().one_or_none()
    samples = conn.execute(
        select(tasks.c.key, tasks.c.conversation_id, tasks.c.agent, tasks.c.adapter, round_samples.c.split)
        .join(round_samples, round_samples.c.task_id == tasks.c.id)
        .where(round_samples.c.round_id == row["id"])
        .order_by(tasks.c.id)
    ).all()
    result = row["result"] or {}
    left_out = result.get("left_out", {})
    train = [sample for sample in samples if sample.split == Split.TRAIN and sample.key not in left_out]
    served = conn.execute(
        select(deployments).where(deployments.c.adapter == row["name"]).order_by(deployments.c.id)
    ).mappings()
    comparison = adapter["comparison"] if adapter else result.get("comparison")
    return {
        "kind": "round",
        "id": row["name"],
        **_target(row),
        **{key: row[key] for key in _ROUND},
        "adapter": adapter and {key: adapter[key] for key in ("name", "path", "sha256", "state", "base_model")},
        "comparison": comparison and {key: value for key, value in comparison.items() if key != "scores"},
        "versions": result.get("versions", {}),
        "usage": result.get("usage", {}),
        "sampling": result.get("sampling"),
        "samples": [
            {"task_id": s.key, "conversation_id": s.conversation_id, "agent": s.agent, "served_by": s.adapter}
            for s in train
        ],
        "conversations": sorted({s.conversation_id for s in train}),
        "left_out": left_out,
        "held_out": sum(sample.split == Split.HELD_OUT for sample in samples),
        "deployments": [
            {key: d[key] for key in ("alias", "state", "reason", "previous", "activated_at", "retired_at", "error")}
            for d in served
        ],
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


def task_story(conn: Connection, number: int | None, takes: Selected) -> dict[str, Any] | None:
    """The verdicts, rounds and history of a task, and why rounds leave it out; None without a number."""
    if number is None:
        return None
    task = conn.execute(select(tasks).where(tasks.c.id == number)).mappings().one()
    judged = conn.execute(select(verdicts).where(verdicts.c.task_id == task["id"]).order_by(verdicts.c.id)).mappings()
    used = conn.execute(
        select(rounds.c.name, rounds.c.state, round_samples.c.split)
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
        "rounds": [{"round": u.name, "state": u.state, "split": u.split} for u in used],
        "history": [{"at": h.at, "old": h.old, "new": h.new, "detail": h.detail} for h in history],
    }
