"""Acceptance by adapter: what became of the tasks that each version of the alias answered."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import Connection, func, select

from flywheel.exclusion import TrainedModels
from flywheel.states import TaskState
from flywheel.store.schema import tasks

_ACCEPTED = [TaskState.ACCEPTED.value, TaskState.RESERVED.value, TaskState.CONSUMED.value]


def by_adapter(conn: Connection, models: TrainedModels) -> list[dict[str, Any]]:
    """Counts of the tasks that each adapter answered, by outcome; "" is the base model.

    `acceptance` is the share of accepted tasks among accepted and rejected ones. Tasks of other models than the
    alias, its versions and its base are left out.
    """
    counts: dict[str, dict[str, int]] = {}
    rows = conn.execute(
        select(tasks.c.adapter, tasks.c.model, tasks.c.state, func.count())
        .group_by(tasks.c.adapter, tasks.c.model, tasks.c.state)
        .order_by(func.min(tasks.c.id))
    )
    for adapter, model, state, number in rows:
        if not models.is_own(model, adapter):
            continue
        entry = counts.setdefault(adapter, {"accepted": 0, "rejected": 0, "undecided": 0, "other": 0})
        kind = "accepted" if state in _ACCEPTED else state if state in ("rejected", "undecided") else "other"
        entry[kind] += number
    return [
        {"adapter": adapter, **entry, "acceptance": _share(entry["accepted"], entry["accepted"] + entry["rejected"])}
        for adapter, entry in sorted(counts.items())
    ]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def other_models(conn: Connection, models: TrainedModels) -> dict[str, int]:
    """How many tasks other models answered, by name, the most first."""
    rows = conn.execute(select(tasks.c.model, tasks.c.adapter, func.count()).group_by(tasks.c.model, tasks.c.adapter))
    found: Counter[str] = Counter()
    for model, adapter, number in rows:
        if not models.is_own(model, adapter):
            found[model] += number
    return dict(found.most_common())
